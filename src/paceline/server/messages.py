"""What the HTTP side programs against: an engine, and what it says of itself and of its prompts.

Owns types only. Knows no process, no socket and no engine; importing it does not import torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from paceline.metrics import EngineStats, SpeculationCounters
from paceline.models.tokenizer import Tokenizer
from paceline.request import TokenLogprobs
from paceline.sampling_params import SamplingParams

EngineState = Literal["starting", "ready", "hung", "draining", "failed", "closed"]
"""``hung``: it was ready, and gives no sign of life. ``failed``: it is not started again."""
SAMPLING_DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Fields that the makers of a model may have given another default (generation_config.json)."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine lives.

    Attributes:
        model: its name, for people.
        max_model_len: most tokens of a prompt and its answer together: the context, or what the
            KV cache holds where that is less.
        promises_identity: plain and speculative answers are equal by construction.
        proposers: who drafts, as the engine was started.
        kv_blocks_total: blocks of ``block_size`` tokens.
        cost_curve: predicted step of one request: (rows, milliseconds). Without a profile the
            second are multiples of the plain step.
        generation_defaults: sampling defaults of the model's makers, by Hugging Face's names.
    """

    model: str
    max_model_len: int
    vocab_size: int
    dtype: str
    backend: str
    promises_identity: bool
    proposers: tuple[str, ...]
    max_num_seqs: int
    kv_blocks_total: int
    block_size: int
    cost_curve: tuple[tuple[int, float], ...] = ()
    has_profile: bool = False
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Piece:
    """What one step, or several in a short time, added to one sample.

    Attributes:
        index: which of the ``n`` samples.
        origins: for each token the proposer that drafted it, or ``target``.
        text: what became certain; empty where the model has no tokenizer.
        logprobs: one per token where they were asked for.
        finish_reason: ``stop``, ``length`` or ``abort`` with the last piece of a sample.
        stop_reason: the stop string or stop token id that matched.
        counters: what speculation did for the sample; with its last piece.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache; with its first piece.
    """

    index: int
    token_ids: Sequence[int]
    origins: Sequence[str]
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    counters: SpeculationCounters | None = None
    num_cached_tokens: int = 0


class Generation(Protocol):
    """The answer to one prompt, as it comes: iterate over its pieces until all samples ended.

    Attributes:
        prompt_logprobs: one per prompt token (None for the first) where they were asked for;
            complete when the first piece has arrived.

    Raises:
        RequestFailedError: from the iteration: the forward or the sampler failed for this prompt.
        EngineDeadError: from the iteration: the engine died.
        EngineClosedError: from the iteration: the engine was closed.
    """

    prompt_logprobs: list[TokenLogprobs | None]

    def __aiter__(self) -> AsyncIterator[Piece]: ...


class ServingEngine(Protocol):
    """What HTTP asks of an engine: :class:`~paceline.server.engine.client.EngineClient` is one.

    Attributes:
        info: valid after :meth:`start`; replaced when the engine is restarted.
        tokenizer: None where the model has none.
        failure: why the state is ``failed``.
        last_stats: the newest counters that the engine told, for when it does not answer; None
            where there are none.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None
    state: EngineState
    failure: str
    num_restarts: int
    last_stats: EngineStats | None

    async def start(self) -> None:
        """Raises: whatever building the engine raised, ``ModelLoadError`` for one."""
        ...

    def generate(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        trace_id: str = "",
    ) -> AbstractAsyncContextManager[Generation]:
        """Leaving the block aborts what still runs.

        Raises (when the block is entered):
            RequestError: the engine refuses the request.
            EngineDeadError: the engine is dead, or being started again.
            EngineClosedError: it was closed.
        """
        ...

    async def stats(self) -> EngineStats:
        """Raises: EngineDeadError, EngineClosedError."""
        ...

    async def flush_prefix_cache(self) -> None: ...

    def drain(self) -> None:
        """Say by the state that no new requests are to be taken on; those that were go on."""
        ...

    async def close(self) -> None:
        """End the engine; prompts in flight raise ``EngineClosedError``."""
        ...
