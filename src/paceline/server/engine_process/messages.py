"""What an engine says of the answers to prompts, as the HTTP side reads it.

Owns types only. Knows no process, no socket and no engine; importing it does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from paceline.request.metrics import EngineInfo, EngineStats, SpeculationCounters
from paceline.request.request import Request, StepOutput, TokenLogprobs
from paceline.request.sampling_params import SamplingParams
from paceline.text.tokenizer import Tokenizer

EngineState = Literal["starting", "ready", "hung", "draining", "failed", "closed"]
"""``hung``: it was ready, and gives no sign of life. ``failed``: it is not started again."""


class Piece(NamedTuple):
    """What one step, or several in a short time, added to one sample.

    Attributes:
        sample: which one of all prompts'; those of the first prompt come first.
        token_ids, origins: for each token the proposer that drafted it, or ``target``.
        text: what became certain; empty where the model has no tokenizer.
        logprobs: one per token where they were asked for.
        finish_reason: ``stop``, ``length`` or ``abort`` with the last piece of a sample.
        stop_reason: the stop string or stop token id that matched.
        counters: what speculation did for the sample; with its last piece.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache; with the first piece
            of a prompt's first sample.
        prompt_logprobs: one per prompt token (None for the first) where they were asked for; with
            the same piece.
        error: why the sample failed, with its last piece.
        embedding: the prompt's vector as float32 values, the lowest byte first, where it was asked
            for; with the first piece of a prompt's first sample.
    """

    sample: int
    token_ids: Sequence[int]
    origins: Sequence[str]
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    counters: SpeculationCounters | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    error: Exception | None = None
    embedding: bytes = b""


class ServedModel(Protocol):
    """What a server reads of an engine's model."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...


class SubmittedPrompt(Protocol):
    """A prompt that an engine has taken on, with a request for each sample."""

    @property
    def requests(self) -> Sequence[Request]: ...


class ServedEngine(Protocol):
    """What a server asks of an engine, which :class:`~paceline.api.llm.LLM` can do."""

    @property
    def checkpoint(self) -> ServedModel: ...
    def info(self) -> EngineInfo: ...
    def stats(self) -> EngineStats: ...
    def submit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        sink: Callable[[Sequence[StepOutput]], None],
        cache_salt: str = "",
        on_added: Callable[[Sequence[SubmittedPrompt]], None] | None = None,
        adapters: Sequence[str | None] = (),
    ) -> object: ...
    def abort(self, request_ids: Sequence[int]) -> None: ...
    def prepare_grammars(self) -> None: ...
    def flush_prefix_cache(self) -> None: ...
    def load_lora(self, name: str, folder: str, replaces: bool = False) -> None: ...
    def unload_lora(self, name: str) -> None: ...


EngineFactory = Callable[..., ServedEngine]
"""Makes the engine in its own process. It travels there pickled: a function that can be imported,
or a ``functools.partial`` of one. It gets ``lora``, folders of adapters by their names, where there
are some."""
