"""Streamed requests to a server: their bodies, made before the run, and what was measured of each.

Owns the clock: a token's time is when its bytes were read. Counts of tokens are the server's own.
Needs aiohttp, which a plain installation lacks, and says how to get it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.installation import install_command

__all__ = ["aiohttp"]


# Less than the 5 seconds after which uvicorn closes an idle connection: a request that is sent just
# then would fail.
KEEPALIVE_S = 4.0
# How much of a server's words on an error is kept.
MESSAGE_LENGTH = 200
_DONE = b"[DONE]"
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


class EventParser:
    """Collects bytes as they arrive, and gives the data of the events that they complete.

    Args:
        limit: most bytes of one event.

    The format is the HTML standard's: lines of ``field: value``, an empty line ends an event, lines
    that begin with a colon are comments, several data lines are joined.
    """

    def __init__(self, limit: int = 1 << 24) -> None:
        self._rest = b""
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that ends in these bytes; ``ValueError`` for too long a one."""
        if b"\r" in data or self._rest.endswith(b"\r"):
            # Lines may end with CR LF; a last CR waits for its LF.
            data, self._rest = (self._rest + data).replace(b"\r\n", b"\n"), b""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > self._limit:
            raise ValueError(f"an event of more than {self._limit} bytes")
        payloads = (_data_of(event) for event in events)
        return [data for data in payloads if data]


def _data_of(event: bytes) -> bytes:
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


@dataclass(slots=True)
class Outcome:
    """A request after it ended; times in seconds.

    Attributes:
        start: when it was sent, since the run began.
        queued: how long it waited for its turn under ``--max-concurrency``.
        ttft: from sending to the first text; of an answer without any text, to its end.
        itls: between texts that arrived one after another; one can be several tokens.
        latency: from sending to the end.
        prompt_len, output_len: tokens by the server's ``usage``.
        error: why it failed; empty if it did not. Nothing else counts then.
    """

    prompt_len: int = 0
    output_len: int = 0
    start: float = 0.0
    queued: float = 0.0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    error: str = ""

    @property
    def tpot(self) -> float:
        """Time per output token after the first; 0 without a second one."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


def new_session(headers: Mapping[str, str], timeout_s: float) -> aiohttp.ClientSession:
    """A session without a limit of connections, which are kept for the next request."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        headers={**headers, "Content-Type": "application/json"},
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(60.0, timeout_s)),
    )


async def send(session: aiohttp.ClientSession, url: str, body: bytes, outcome: Outcome) -> None:
    """Send one request and fill its outcome; whatever goes wrong becomes its ``error``."""
    began = time.perf_counter()
    try:
        async with session.post(url, data=body) as response:
            if response.status != 200:
                raise _FailedError(await refusal(response))
            await _read(response, began, outcome)
    except _FailedError as failure:
        outcome.error = str(failure)
    except TimeoutError:
        outcome.error = "timed out"
    except aiohttp.ClientConnectorError as error:
        outcome.error = f"no connection: {error}"[:MESSAGE_LENGTH]
    except (aiohttp.ClientError, OSError) as error:
        outcome.error = f"disconnected: {type(error).__name__}"


class _FailedError(Exception):
    """The server's answer is an error, or is none."""


async def refusal(response: aiohttp.ClientResponse) -> str:
    """Status and message of an answer that is an error."""
    text = await response.text(errors="replace")
    try:
        message = _message(json.loads(text))
    except ValueError:
        message = " ".join(text.split())
    return f"HTTP {response.status}: {message}"[:MESSAGE_LENGTH]


def _message(document: Any) -> str:
    error = document.get("error", document) if isinstance(document, dict) else document
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())


async def _read(response: aiohttp.ClientResponse, began: float, outcome: Outcome) -> None:
    stream = _Stream(outcome, began)
    parser = EventParser()
    async for data in response.content.iter_any():
        now = time.perf_counter()
        try:
            for event in parser.feed(data):
                stream.take(event, now)
        except ValueError as error:
            raise _FailedError(
                f"a stream that is not valid JSON: {error}"[:MESSAGE_LENGTH]
            ) from error
    stream.end()


class _Stream:
    """What the events of one answer say."""

    def __init__(self, outcome: Outcome, began: float) -> None:
        self._outcome = outcome
        self._began = began
        self._last = 0.0
        self._texts: list[str] = []
        self._usage: Mapping[str, Any] | None = None
        self._is_done = False

    def take(self, event: bytes, now: float) -> None:
        """Read one event that arrived at ``now``."""
        if event == _DONE:
            self._is_done = True
            return
        chunk = json.loads(event)
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise _FailedError(f"error in the stream: {_message(chunk)}"[:MESSAGE_LENGTH])
        self._usage = chunk.get("usage") or self._usage
        choices = chunk.get("choices")
        if not choices:
            return
        text = _text(choices[0])
        finish_reason = choices[0].get("finish_reason")
        if text:
            self._texts.append(text)
            self._mark(now)
        if finish_reason:
            self._outcome.finish_reason = finish_reason
        # What follows the last text, such as the count of tokens, is not generation.
        if text or finish_reason:
            self._outcome.latency = now - self._began

    def _mark(self, now: float) -> None:
        if self._last:
            self._outcome.itls.append(now - self._last)
        else:
            self._outcome.ttft = now - self._began
        self._last = now

    def end(self) -> None:
        """Check that the answer is complete."""
        outcome = self._outcome
        if outcome.finish_reason is None:
            cut = "the stream ended without a finish_reason"
            raise _FailedError(cut if self._is_done else f"disconnected: {cut}")
        try:
            usage = self._usage or {}
            outcome.prompt_len = int(usage["prompt_tokens"])
            outcome.output_len = int(usage["completion_tokens"])
        except (KeyError, TypeError, ValueError):
            message = "no usage in the stream, so that its tokens cannot be counted"
            raise _FailedError(message) from None
        outcome.text = "".join(self._texts)
        if not self._texts:
            outcome.ttft = outcome.latency


def _text(choice: Mapping[str, Any]) -> str:
    """The visible text of a completion's or a chat's chunk, arguments of tools included."""
    if (text := choice.get("text")) is not None:
        return str(text)
    delta = choice.get("delta") or {}
    texts = [delta.get(name) or "" for name in _TEXT_FIELDS]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        texts += [function.get("name") or "", function.get("arguments") or ""]
    return "".join(texts)


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
class RequestSampling:
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


def make_bodies(
    target: Target, samples: Sequence[Sample], sampling: RequestSampling
) -> list[bytes]:
    """The JSON of each sample's request; its seed follows from its place."""
    return [_body(target, sample, sampling, i) for i, sample in enumerate(samples)]


def _body(target: Target, sample: Sample, sampling: RequestSampling, index: int) -> bytes:
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


try:
    import aiohttp
except ModuleNotFoundError as missing:
    raise ConfigError(
        f"benchmarks of servers need the extra: {install_command('bench')} ({missing})"
    ) from missing
