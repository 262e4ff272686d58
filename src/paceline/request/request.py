"""The state of one request from admission to its last token. Owns no policy and no tensors."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from paceline.request.engine_stats import SpeculationCounters
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree

TARGET_ORIGIN = "target"
"""Origin of a token that no proposer drafted."""
NO_DRAFT = DraftTree()
"""The empty draft of whoever has none; never changed."""
MAX_UNCOUNTED = 64
"""Most steps of a request that are kept to be counted together: what counts them is in no cache
after a forward, and takes many times as long then."""


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class StopChecker(Protocol):
    """Turns committed tokens into text and says when a stop string ended it.

    The engine is handed one per request and knows nothing else of text.
    """

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Take one committed token; return the stop string that it completed, if any.

        Without ``may_stop`` stop strings up to here do not count.
        """
        ...

    def take_text(self, *, final: bool) -> str:
        """Text that is certain since the last call; with ``final`` also what was held back."""
        ...


class Constraint(Protocol):
    """Which tokens may follow one request's output; the engine knows nothing else of grammars.

    It follows the committed tokens by :meth:`advance` alone. A *path* is what may come after them,
    and asking about paths changes nothing that can be seen.
    """

    @property
    def is_complete(self) -> bool:
        """The output is whole and nothing may follow it."""
        ...

    def advance(self, token_id: int) -> None:
        """Take one committed token that does not end the text."""
        ...

    def mask(self, path: Sequence[int]) -> bytes:
        """One bit per token that may follow the path; token 0 is the lowest bit of byte 0."""
        ...

    def legal(self, tree: DraftTree) -> DraftTree:
        """The part of a draft that may follow."""
        ...

    def certain(self, path: Sequence[int]) -> int | None:
        """The only token that may follow the path, where it is known without a mask."""
        ...

    def usual(self, path: Sequence[int]) -> int | None:
        """The token with which a string that has to follow the path usually begins."""
        ...

    def alternatives(self, path: Sequence[int], most: int) -> list[int]:
        """Tokens that may follow the path, the longest spellings; none if more than ``most``."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """What is added to the model's linears for the requests that ask for it.

    Attributes:
        weights: as the model's forward keeps them; nobody else looks inside.
        key: tells it from all others, also from one of the same name before it.
    """

    name: str
    weights: Any
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    def salt(self, cache_salt: str) -> str:
        """Of a request that has the adapter: it shares nothing with requests that have not."""
        return f"{cache_salt}\0{self.key}"


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one emitted token: its own, and the ``top`` as (token id, logprob).

    The ``top`` are the likeliest tokens, or in their order those that the request has named.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. A request with ``n > 1`` is ``n`` of these, one per sample.

    ``token_ids`` holds prompt and output; ``num_computed`` of them have committed KV. While a
    request decodes, ``num_computed == len(token_ids) - 1``: the last token is the next root.
    ``sampling_rules`` is what the sampler keeps between steps, by parameters; nobody else reads it.
    ``pooled`` is what :mod:`paceline.engine.prompt_results` keeps until ``embedding`` is the
    prompt's vector, float32 values with the lowest byte first.
    ``resume_at`` is the position near the prompt's end up to which a later one is likely to be the
    same; 0 where that is not known.
    ``cache_salt`` is that of the caller and the ``adapter`` together.
    ``num_pruned_tokens`` are draft nodes that the planner left out.
    ``wants_argmax`` says that nothing of its logits is needed but the best token of each row, and
    ``is_forced`` that it says itself how much is to be drafted, so that nothing else decides it.
    """

    request_id: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    max_len: int
    eos_token_ids: frozenset[int] = frozenset()
    sample_index: int = 0
    fork_of: int | None = None
    cache_salt: str = ""
    resume_at: int = 0
    stop_checker: StopChecker | None = None
    constraint: Constraint | None = None
    adapter: Adapter | None = None
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_pruned_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    pooled: Any = None
    embedding: bytes = b""
    _counters: SpeculationCounters = field(
        default_factory=SpeculationCounters, init=False, repr=False
    )
    _uncounted: list[VerifyResult] = field(default_factory=list, init=False, repr=False)
    sampling_rules: list[tuple[SamplingParams, Any]] = field(
        default_factory=list, init=False, repr=False
    )
    is_plain_greedy: bool = field(init=False)
    reports_logprobs: bool = field(init=False)
    wants_argmax: bool = field(init=False)
    is_forced: bool = field(init=False)
    adapter_name: str | None = field(init=False)

    def __post_init__(self) -> None:  # asked in every step, and parameters do not change
        params, wish = self.params, self.params.speculative
        self.is_plain_greedy = params.is_plain_greedy
        self.reports_logprobs = params.reports_logprobs
        wants_logprobs = self.reports_logprobs or params.prompt_logprobs is not None
        self.wants_argmax = self.is_plain_greedy and not wants_logprobs
        self.is_forced = wish.enabled and bool(wish.num_speculative_tokens)
        self.adapter_name = None if self.adapter is None else self.adapter.name

    @property
    def counters(self) -> SpeculationCounters:
        """What became of its drafts, in all steps up to here."""
        self._count_all()
        return self._counters

    def count(self, result: VerifyResult) -> None:
        """Count a committed step, after any cut."""
        self._uncounted.append(result)
        if len(self._uncounted) == MAX_UNCOUNTED:
            self._count_all()

    def _count_all(self) -> None:
        self._counters.num_pruned_tokens = self.num_pruned_tokens
        for result in self._uncounted:
            count_step(result, self._counters)
        self._uncounted.clear()

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_uncomputed(self) -> int:
        """Tokens to be forwarded before the next can be sampled, the last one included."""
        return len(self.token_ids) - self.num_computed

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


@dataclass(slots=True)
class VerifyResult:
    """What the target made of one request's draft in one step.

    Attributes:
        path: span nodes that were accepted, from the root (node 0) down.
        token_ids: emitted tokens: those of the accepted draft nodes, then the bonus token.
        origins: for each emitted token the proposer that drafted it, or :data:`TARGET_ORIGIN`.
        draft: the nodes that were verified, in span order without the root.
        logprobs: one entry per emitted token when the request asked for them, otherwise empty.
    """

    path: Sequence[int]
    token_ids: Sequence[int]
    origins: Sequence[str]
    draft: DraftTree = field(default_factory=lambda: NO_DRAFT)
    logprobs: Sequence[TokenLogprobs] = ()

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1


def count_step(result: VerifyResult, counters: SpeculationCounters) -> None:
    """Record a committed step, after any cut."""
    origins, draft = result.origins, result.draft
    accepted = origins[:-1] if origins[-1] == TARGET_ORIGIN else origins
    depth = max(draft.depths()) if draft.token_ids else 0
    counters.record(len(origins), draft.origins, accepted, depth)


@dataclass(slots=True)
class StepOutput:
    """What one step added to one request; the unit of streaming."""

    request_id: int
    token_ids: Sequence[int]
    origins: Sequence[str]
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
