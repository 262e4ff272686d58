"""An engine without a model: the interface of ``EngineClient``, tokens by rule.

By default the answer to a prompt is the text :data:`ANSWER`, then the end-of-sequence token.
Another answer is a string, a list of token ids, or a function of the prompt's ids. Stop strings,
``max_tokens``, ``n`` (all samples say the same), log-probs and refusals behave as the engine's.
"""

from __future__ import annotations

import asyncio
import functools
import math
import struct
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from paceline.core.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    RequestError,
)
from paceline.request.engine_stats import EngineInfo, EngineStats, SpeculationCounters
from paceline.request.request import TokenLogprobs
from paceline.request.sampling_params import FROM_FILES, NEUTRAL, SamplingDefaults, SamplingParams
from paceline.server.engine_process.backlog import Share
from paceline.server.engine_process.life import OutputHistory
from paceline.server.engine_process.messages import EngineState, Piece
from paceline.server.engine_process.process import joined
from paceline.text.detokenizer import TextStream
from paceline.text.tokenizer import Tokenizer

ANSWER = " The rain in Spain stays mainly in the plain."
Answer = str | Sequence[int] | Callable[[list[int]], Sequence[int]]

STATED = SamplingDefaults(NEUTRAL, FROM_FILES)


@functools.cache
def embedded_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(str(files("paceline") / "embedded" / "target"))


@dataclass(slots=True)
class Call:
    """What one ``generate`` was asked, and whether it was left before its end."""

    token_ids: list[int]
    params: SamplingParams
    cache_salt: str
    trace_id: str
    adapter: str | None = None
    aborted: bool = False
    finished: bool = False


@dataclass
class FakeGeneration:
    """Answers that are already known, told one token at a time."""

    engine: FakeEngine
    calls: list[Call]

    def __post_init__(self) -> None:
        self.prompt_logprobs = [self._of_prompt(call) for call in self.calls]
        self.on_read: Callable[[Piece], None] = lambda _: None

    def _of_prompt(self, call: Call) -> list[TokenLogprobs | None]:
        count = call.params.prompt_logprobs
        if count is None:
            return []
        return [None, *(self.engine.logprobs_of(i, count) for i in call.token_ids[1:])]

    async def __aiter__(self) -> AsyncIterator[Piece]:
        engine, samples = self.engine, list[list[Piece]]()
        for call in self.calls:
            told = engine.answer_ids(call.token_ids)
            for _ in range(call.params.n):
                samples.append(engine.cut(engine.pieces(call, told, len(samples))))
        for step in range(max(len(pieces) for pieces in samples)):
            await engine.pause(step)
            for pieces in samples:
                engine.check_alive(step)
                if step < len(pieces):
                    self.on_read(pieces[step])
                    yield pieces[step]
        for call in self.calls:
            call.finished = True


@dataclass
class FakeEngine:
    """See the module.

    Attributes:
        answer: what every prompt is answered with.
        cuts: after how many tokens a piece ends and another begins; None: each token is a piece.
        seconds_per_token: pause before each token.
        dies_at: the engine is dead when that many tokens of an answer have been told.
        error_at: (token, error): the generation raises that error there.
        calls: every ``generate`` that was accepted.
    """

    answer: Answer = ANSWER
    tokenizer: Tokenizer | None = field(default_factory=embedded_tokenizer)
    seconds_per_token: float = 0.0
    dies_at: int | None = None
    error_at: tuple[int, Exception] | None = None
    max_model_len: int = 512
    origins: Sequence[str] = ("prompt_lookup", "target")
    sampling: SamplingDefaults = STATED
    state: EngineState = "starting"
    failure: str = ""
    num_restarts: int = 0
    pid: int | None = None
    last_stats: EngineStats | None = None
    output_history: OutputHistory = field(default_factory=OutputHistory)
    calls: list[Call] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    num_flushes: int = 0
    cuts: Collection[int] | None = None
    stats_to_tell: EngineStats = field(default_factory=EngineStats)

    def __post_init__(self) -> None:
        self.info = EngineInfo(
            model="fake",
            max_model_len=self.max_model_len,
            vocab_size=self.tokenizer.vocab_size if self.tokenizer else 48,
            longest_token=self.tokenizer.longest_token if self.tokenizer else 0,
            dtype="float32",
            backend="reference",
            promises_identity=True,
            proposers=("prompt_lookup",),
            max_num_seqs=8,
            kv_blocks_total=100,
            block_size=16,
            cost_curve=((1, 1.0), (8, 1.5), (16, 2.6)),
            architecture="llama",
            hidden_size=8,
            num_layers=2,
            num_bytes=1 << 20,
            num_weights=1_234_567,
            sampling=self.sampling,
        )
        self._eos = self.tokenizer.eos_token_ids[:1] if self.tokenizer else (0,)

    async def start(self) -> None:
        self.state = "ready"

    @asynccontextmanager
    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        cache_salt: str = "",
        trace_id: str = "",
        adapter: str | None = None,
        share: Share | None = None,
    ) -> AsyncIterator[FakeGeneration]:
        pairs = list(zip(prompts, params, strict=True))
        for token_ids, wish in pairs:
            self._check(token_ids, wish)
        calls = [
            Call(list(ids), wish, cache_salt, trace_id, adapter=adapter) for ids, wish in pairs
        ]
        self.calls += calls
        try:
            yield FakeGeneration(self, calls)
        finally:
            for call in calls:
                call.aborted = not call.finished

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        self.check_alive()
        if self.state not in ("ready", "draining"):
            raise EngineClosedError(f"the engine is {self.state}")
        if not token_ids:
            raise RequestError("the prompt is empty; at least one token is needed")
        if len(token_ids) >= self.info.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens; the context holds {self.max_model_len}"
            )
        params.check_vocabulary(self.info.vocab_size)

    async def pause(self, step: int) -> None:
        await asyncio.sleep(self.seconds_per_token)

    def check_alive(self, step: int = 0) -> None:
        if self.dies_at is not None and step >= self.dies_at:
            self.state = "failed"
            raise EngineDeadError("the engine died")
        if self.error_at is not None and step >= self.error_at[0] > 0:
            raise self.error_at[1]

    def answer_ids(self, prompt: list[int]) -> list[int]:
        """The whole answer, its end-of-sequence token included."""
        answer: Any = self.answer(prompt) if callable(self.answer) else self.answer
        if isinstance(answer, str):
            assert self.tokenizer is not None
            answer = self.tokenizer.encode(answer, add_special_tokens=False)
        return [*answer, *self._eos]

    def pieces(self, call: Call, answer: Sequence[int], index: int) -> list[Piece]:
        """One piece per token, cut where the engine would cut."""
        params, found = call.params, list[Piece]()
        tokenizer = self.tokenizer
        stream = None
        if tokenizer is not None:
            include = params.include_stop_str_in_output
            stream = TextStream(tokenizer, call.token_ids, params.stop, include)
        room = self.info.max_model_len - len(call.token_ids)
        limit = min(params.max_tokens or room, room)
        for count, token in enumerate(answer[:limit], start=1):
            origin = self.origins[(count - 1) % len(self.origins)]
            end: dict[str, Any] = {}
            logprobs = []
            if params.logprobs is not None:
                logprobs = [self.logprobs_of(token, params.logprobs)]
            stopped = stream.push(token, may_stop=count >= params.min_tokens) if stream else None
            if token in self._eos and not params.ignore_eos:
                end = {"finish_reason": "stop"}
            elif token in params.stop_token_ids:
                end = {"finish_reason": "stop", "stop_reason": token}
            elif stopped is not None:
                end = {"finish_reason": "stop", "stop_reason": stopped}
            elif count == min(limit, len(answer)):
                end = {"finish_reason": "length"}
            text = "" if stream is None else stream.take_text(final=bool(end))
            if end:
                end["counters"] = self._counters(count)
            if params.pooling is not None:
                end["embedding"] = self.embedding_of(call.token_ids, params.pooling)
            found.append(Piece(index, [token], [origin], text, logprobs, **end))
            if end:
                break
        return found

    def cut(self, pieces: list[Piece]) -> list[Piece]:
        """Pieces of one token each as those that are told."""
        if self.cuts is None:
            return pieces
        ends = [*sorted({end for end in self.cuts if 0 < end < len(pieces)}), len(pieces)]
        return [joined(pieces[i:j]) for i, j in zip([0, *ends], ends, strict=False)]

    def embedding_of(self, token_ids: Sequence[int], pooling: str) -> bytes:
        """A vector of length 1 that depends on nothing else."""
        counted = token_ids[-1:] if pooling == "last" else token_ids
        values = [1.0 + sum(counted) % (7 + i) for i in range(self.info.hidden_size)]
        return struct.pack(f"<{len(values)}f", *(each / math.hypot(*values) for each in values))

    @staticmethod
    def _counters(num_tokens: int) -> SpeculationCounters:
        """As if every second token had been drafted, one per step, and accepted."""
        counters = SpeculationCounters()
        for _ in range(num_tokens // 2):
            counters.record(2, ["prompt_lookup"], ["prompt_lookup"], 1)
        if num_tokens % 2:
            counters.record(1, [], [], 0)
        return counters

    def logprobs_of(self, token: int, top: int) -> TokenLogprobs:
        """The token itself first, then its successors in the vocabulary."""
        size = self.info.vocab_size
        pairs = tuple(((token + i) % size, -0.5 * (i + 1)) for i in range(top))
        return TokenLogprobs(token, -0.5, 1, pairs)

    async def stats(self) -> EngineStats:
        self.check_alive()
        return self.stats_to_tell

    async def flush_prefix_cache(self) -> None:
        self.num_flushes += 1

    def drain(self) -> None:
        self.state = "draining"

    async def close(self) -> None:
        self.state = "closed"
