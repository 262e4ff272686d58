"""Drafts level by level over the KV of a draft model. Knows neither the model nor any logits.

Per request the draft's KV holds a prefix of ``request.token_ids``, or of these from
:meth:`Drafter._first` on. Before it drafts, the model reads what it lacks, always at least the last
token, below which the first level of the tree hangs.
Each further level is one forward over all requests, for the nodes that can still have a child among
the best: the tree is exactly the ``max_nodes`` nodes with the highest path probability. After
verification the KV of drafted nodes that were committed is kept and the rest is rolled back.

A draft with recurrent layers keeps a state of a request, which does not go back. So the request's
last token is never part of it before the next one is known. Like the drafted nodes below it, it is
logged as those of a target are (:mod:`paceline.cache.states`), and every level of a tree forwards
the nodes above it again. How large caches and states of drafts are is said here too.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress

from paceline.cache.block_pool import blocks_for
from paceline.cache.kv_cache import KVCache
from paceline.cache.memory_needs import bytes_per_block, state_room
from paceline.cache.states import States
from paceline.config import SpeculativeConfig
from paceline.config.speculative import ForwardingConfig
from paceline.core.errors import ConfigError, RequestError
from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.planner.drafts import Prices
from paceline.proposers.base import DraftBudget, Proposer, TargetInfo
from paceline.proposers.base.growth import Candidates, DraftState, Growth, ranking_params
from paceline.request.request import Request, VerifyResult
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import ROOT, DraftTree, Span
from paceline.sampling.logit_edits import SamplingRow


class Drafter(Proposer, ABC):
    """See the module's docstring. Subclasses say where candidates come from."""

    costs_forwards = True
    config: ForwardingConfig

    def __init__(self, config: ForwardingConfig, kv: KVCache, max_len: int) -> None:
        self.config = config
        self._kv = kv
        self.max_len = max_len
        try:
            ranking_params(config, SamplingParams())
        except RequestError as error:
            raise ConfigError(f"speculative configuration of the draft model: {error}") from error
        self._drafts: dict[int, DraftState] = {}

    @abstractmethod
    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        """Forward spans; what may follow each of their sampled rows."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        growths = self.grow(requests, budget)
        return [DraftTree() if growth is None else growth.finished(self.name) for growth in growths]

    def grow(self, requests: Sequence[Request], budget: DraftBudget) -> list[Growth | None]:
        """What :meth:`propose` chooses its nodes from: every candidate of every level.

        None for a request that has no budget, or no room in the draft's context.
        """
        growths = [
            self._start(index, *each)
            for index, each in enumerate(
                zip(requests, budget.max_nodes, budget.max_depth, strict=True)
            )
        ]
        wanted = [growth for growth in growths if growth is not None]
        try:
            self._draft(*self._read(wanted), budget.prices)
        except BaseException:
            for growth in wanted:  # what was written is unknown: begin anew
                self.finish(growth.request)
            raise
        return growths

    def observe(self, request: Request, result: VerifyResult) -> None:
        draft = self._drafts.get(request.request_id)
        if draft is not None:
            self._settle(request, draft)

    def finish(self, request: Request) -> None:
        if self._drafts.pop(request.request_id, None) is not None:
            self._kv.free(request.request_id)

    def num_held(self, request: Request) -> int:
        """Tokens of the request, from where the draft begins, whose KV is held."""
        draft = self._drafts.get(request.request_id)
        return len(draft.tokens) if draft else 0

    def rewind(self, request: Request, length: int) -> None:
        """Forget what is held of a request's tokens from ``length`` on: they become others."""
        draft = self._drafts.get(request.request_id)
        if draft is not None and len(draft.tokens) > length:
            draft.kv_tokens, draft.kv_parents = [], []
            del draft.tokens[length:]
            self._kv.truncate(request.request_id, length)

    def lag(self, request: Request) -> int | None:
        return self._length(request) - self.num_held(request)

    def context_length(self, request: Request) -> int:
        """The request's length, unless the draft holds KV of a token that the request does not."""
        draft = self._drafts.get(request.request_id)
        for at, token in enumerate(draft.tokens if draft else (), self._first(request)):
            if at >= len(request.token_ids) or request.token_ids[at] != token:
                return at
        return len(request.token_ids)

    def _first(self, request: Request) -> int:
        """Where in a request's tokens begins what the draft reads."""
        return 0

    def _length(self, request: Request) -> int:
        """How many of a request's tokens the draft reads, once it lacks none."""
        return len(request.token_ids) - self._first(request)

    def _start(self, index: int, request: Request, nodes: int, depth: int) -> Growth | None:
        """A tree to grow, or None where there is no budget or no room in the draft's context."""
        room = self.max_len + 1 - self._length(request)
        nodes = min(nodes, self.config.tree_nodes)
        depth = min(depth, self.config.num_speculative_tokens, room)
        if nodes < 1 or depth < 1:
            return None
        draft = self._drafts.get(request.request_id) or self._open(request)
        if draft is None:
            return None
        self._settle(request, draft)
        return Growth(index, request, draft, nodes, depth)

    def _open(self, request: Request) -> DraftState | None:
        """What is held of a request that is drafted for the first time; None without room."""
        if not self._kv.can_open:
            return None
        params, has_states = ranking_params(self.config, request.params), self._has_states
        draft = DraftState(params, holds_last=not has_states)
        self._drafts[request.request_id] = draft
        self._kv.open(request.request_id)
        return draft

    def _settle(self, request: Request, draft: DraftState) -> None:
        """Keep the KV of drafted tokens that were committed; roll the rest back.

        KV of the request's last token is never kept: its logits begin the next tree.
        """
        if self._has_states:
            self._settle_states(request, draft)
            return
        if draft.kv_tokens:
            next_token = self._first(request) + len(draft.tokens)
            path = self._kept(draft, request.token_ids[next_token:-1])
            if path:
                self._kv.commit(request.request_id, path)
                draft.tokens += request.token_ids[next_token : next_token + len(path)]
            else:
                self._kv.rollback(request.request_id)
            draft.kv_tokens, draft.kv_parents = [], []
        length = self._length(request)
        if draft.tokens and len(draft.tokens) >= length:
            del draft.tokens[length - 1 :]
            self._kv.truncate(request.request_id, length - 1)

    def _settle_states(self, request: Request, draft: DraftState) -> None:
        """Keep drafted nodes that were committed, where a level was forwarded."""
        committed = request.token_ids[len(draft.tokens) : -1]
        if len(draft.kv_tokens) > 1 and committed:
            path = [0, *(slot + 1 for slot in draft.walk(committed[1:]))]
            self._kv.commit(request.request_id, path)
            draft.tokens += committed[: len(path)]
        elif draft.kv_tokens:
            self._kv.rollback(request.request_id)
        draft.kv_tokens, draft.kv_parents = [], []

    def _kept(self, draft: DraftState, committed: Sequence[int]) -> Sequence[int]:
        """Slots of drafted nodes, after the committed ones, that hold what reading would write."""
        return draft.walk(committed)

    def _read(self, growths: Sequence[Growth]) -> tuple[list[Growth], list[Span]]:
        """What the draft lacks, to be read in the next forward, first come first served.

        What one step of the request leaves behind is always read; more than that shares the
        step's ``catch_up_tokens``.

        Returns:
            The requests that will lack nothing any more, and the spans, of which theirs sample
            their last tokens.
        """
        room = self.config.catch_up_tokens
        spans, ready = [], []
        for growth in growths:
            request_id, held = growth.request.request_id, len(growth.draft.tokens)
            count = lag = self._length(growth.request) - held
            if lag > self.config.num_speculative_tokens + 1:
                count = min(lag, room)
                room -= count
            # Room for all of it, lest many requests each hold a part and none can go on.
            fits = self._kv.blocks_missing(request_id, lag) <= self._kv.pool.num_available
            # All but the last token go into a state at once, unless its log has room for them.
            states = self._kv.states
            is_logged = states is None or count <= states.memory.num_nodes
            certain = 0 if is_logged else count - (count == lag)
            if not count or not fits or not self._kv.reserve(request_id, count, certain):
                continue
            next_token = self._first(growth.request) + held
            chunk = growth.request.token_ids[next_token : next_token + count]
            spans.append(Span.chunk(request_id, held, chunk, sample=count == lag))
            if not self._has_states:
                self._kv.commit(request_id, range(count))
                growth.draft.tokens += chunk
            if count == lag:
                ready.append(growth)
        return ready, spans

    def _draft(self, growths: list[Growth], spans: Sequence[Span], prices: Prices) -> None:
        """Forward spans, and grow the trees of those whose last tokens they sample, in order."""
        if spans:
            candidates = self._candidates(spans, [sampling_row(each, ROOT) for each in growths])
            if self._has_states:
                self._commit_read(spans)
            self._add_levels(growths, candidates, prices)

    @property
    def _has_states(self) -> bool:
        return self._kv.states is not None

    def _commit_read(self, spans: Sequence[Span]) -> None:
        """Make tokens that a forward has read part of the states; those that are sampled wait."""
        for span in spans:
            count = len(span.token_ids) - len(span.sample_rows)
            if count:
                self._kv.commit(span.request_id, range(count))
                self._drafts[span.request_id].tokens += span.token_ids[:count]

    def _add_levels(
        self, growths: list[Growth], candidates: Iterable[Candidates], prices: Prices
    ) -> None:
        """Level by level, until no request has a node left whose children could count or pay."""
        nodes = [(growth, ROOT) for growth in growths]
        for growth in growths:
            growth.draft.kv_tokens, growth.draft.kv_parents = [growth.request.token_ids[-1]], [ROOT]
        while nodes:
            for (growth, node), (tokens, estimates) in zip(nodes, candidates, strict=True):
                growth.add(node, tokens, estimates, self.config.min_accept_prob)
            growths = [growth for growth in growths if growth.choose()]
            pays = prices.are_met([growth.promise() for growth in growths])
            growths = [
                growth
                for growth, pay in zip(growths, pays, strict=True)
                if pay and self._reserve(growth, growth.num_drafted + len(growth.frontier))
            ]
            nodes = [(growth, node) for growth in growths for node in growth.frontier]
            if nodes:
                spans = [growth.span(again=self._has_states) for growth in growths]
                candidates = self._candidates(spans, [sampling_row(*each) for each in nodes])

    def _reserve(self, growth: Growth, drafted: int) -> bool:
        """Room for so many drafted nodes; False where there is none."""
        last = not growth.draft.holds_last
        return self._kv.reserve(growth.request.request_id, drafted + last)


def sampling_row(growth: Growth, node: int) -> SamplingRow:
    """How candidates below a node, or below the request's tokens, are ranked."""
    path = growth.paths[node] if node >= 0 else ()
    mask = grammar_mask(growth.request, path)
    return SamplingRow(growth.request, path, growth.draft.params, mask)


def grammar_mask(request: Request, path: Sequence[int]) -> bytes | None:
    """The tokens that a request's grammar allows after a path; None allows all."""
    if request.constraint is not None:
        with suppress(Exception):  # verification meets it too, and fails the request
            return request.constraint.mask(path)
    return None


log = logging.getLogger(__name__)


def draft_kv(
    shape: ModelConfig, ops: Ops, config: SpeculativeConfig, target: TargetInfo, max_len: int
) -> KVCache:
    """As many blocks as all requests at their longest could use, or as the bytes allow."""
    states, budget = None, target.kv_bytes
    if shape.recurrent is not None:
        room = state_room(shape, budget, target.max_num_seqs, config.tree_nodes, checkpoints=False)
        states = States(ops.state_memory(shape, room.num_slots, room.num_lanes, room.num_nodes))
        budget -= room.num_bytes
        log.info(
            "states of the draft's recurrent layers take %.1f MB; at most %d requests are drafted "
            "for at once",
            room.num_bytes / 1e6,
            room.num_lanes,
        )
    per_request = blocks_for(max_len + config.tree_nodes)
    num_blocks = min(
        budget // bytes_per_block(shape, ops.default_kv_dtype),
        1 + target.max_num_seqs * per_request,
    )
    memory = ops.kv_memory(shape, max(0, num_blocks), ops.default_kv_dtype)
    return KVCache(memory, prefix_caching=False, states=states)
