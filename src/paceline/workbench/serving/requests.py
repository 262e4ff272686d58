"""The bodies of requests, made before the run so that sending costs little. Knows no connection."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import ConfigError

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""What speaks which protocol, with its usual endpoint."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with its lengths in tokens.

    Attributes:
        prompt: a text, or a chat as messages.
        prompt_len: as counted when the sample was made; the server's own count is what is reported.
        output_len: most tokens of the answer.
    """

    prompt: str | tuple[Mapping[str, Any], ...]
    prompt_len: int
    output_len: int

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The prompt as a chat."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return list(self.prompt)


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how it is asked.

    Attributes:
        url: where it is, without ``/v1``.
        extra_body: further fields of every request, which come before Paceline's own.
    """

    url: str
    model: str
    backend: str = "openai"
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """What every request says of sampling; None is not sent.

    Attributes:
        seed: of the first request; each further one has the next.
    """

    temperature: float = 0.0
    seed: int = 0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool = False


def clean_url(url: str) -> str:
    """A server's address as the endpoints can be appended to it.

    Raises:
        ConfigError: it is no HTTP address.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not the address of a server; write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def make_bodies(target: Target, samples: Sequence[Sample], sampling: Sampling) -> list[bytes]:
    """The JSON of each sample's request; its seed follows from its place."""
    return [_body(target, sample, sampling, i) for i, sample in enumerate(samples)]


def _body(target: Target, sample: Sample, sampling: Sampling, index: int) -> bytes:
    is_chat = target.backend == "openai-chat"
    if not is_chat and not isinstance(sample.prompt, str):
        raise ConfigError("the dataset has lists of messages, which need --backend openai-chat")
    prompt = {"messages": sample.messages} if is_chat else {"prompt": sample.prompt}
    optional = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    body = {
        "model": target.model,
        **prompt,
        "max_tokens": sample.output_len,
        "temperature": sampling.temperature,
        "seed": sampling.seed + index,
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, value in optional.items() if value is not None},
        **({"ignore_eos": True} if sampling.ignore_eos else {}),
        **target.extra_body,
    }
    return json.dumps(body).encode()
