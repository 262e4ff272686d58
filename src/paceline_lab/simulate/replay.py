"""Replays traces through real proposers and a real planner: the engine without its forwards.

What a target answers depends neither on drafts nor on who shares a step, so logged tokens say what
every verification would have accepted. Scheduler, drafting and planner are the engine's own; a
forward takes the time that the cost model predicts, and drafting what it is said to take. With the
same frozen costs an engine takes exactly the same steps, as long as its KV cache has room and its
prefix cache is off.

Knows no model and no files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from paceline.cache.kv_cache import KVCache
from paceline.config import EngineConfig
from paceline.core.errors import ProposerError, TraceError
from paceline.engine.drafting import Drafting
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Scheduled, step_shape
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import StepShape
from paceline.planner.drafts import TextDrafter
from paceline.planner.planner import FixedPlanner, Planner
from paceline.planner.value import DraftingCost, Source
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request.engine_stats import EngineStats, SpeculationCounters
from paceline.request.request import (
    TARGET_ORIGIN,
    FinishReason,
    Request,
    VerifyResult,
    count_step,
)
from paceline.request.span import DraftTree
from paceline.request.traces import Trace
from paceline_lab.trace.experts import ExpertUnions
from paceline_lab.trace.requests import trace_request


class ReplayClock:
    """A clock that stands still until it is moved on."""

    def __init__(self) -> None:
        self.milliseconds = 0.0

    def __call__(self) -> float:
        """Seconds, as :func:`time.perf_counter` gives them."""
        return self.milliseconds / 1e3


class Charged:
    """A proposer whose calls are charged, by moving the clock on, what they are said to take."""

    def __init__(self, proposer: Proposer, cost: DraftingCost, clock: ReplayClock) -> None:
        self.inner = proposer
        self._cost, self._clock = cost, clock
        self._ms = 0.0
        self.name = proposer.name
        self.config = proposer.config
        self.costs_forwards = proposer.costs_forwards
        self.costs_levels = proposer.costs_levels
        self.drafts_from_text = proposer.drafts_from_text
        self.sees_matches = proposer.sees_matches
        self.taps = proposer.taps
        self.lag = proposer.lag
        self.matched = proposer.matched
        self.follows = proposer.follows
        self.read = proposer.read
        self.observe = proposer.observe
        self.context_length = proposer.context_length
        self.finish = proposer.finish

    @property
    def num_forwards(self) -> int:
        return self.inner.num_forwards

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        lags = [lag for request in requests if (lag := self.lag(request))]
        trees = self.inner.propose(requests, budget)
        levels = 1
        if self.costs_forwards and self.costs_levels:
            levels = max((max(tree.depths()) for tree in trees if len(tree)), default=1)
        ms = self._cost.milliseconds(self.name, levels)
        if lags:
            ms += sum([self._cost.catch_up(self.name, lag) for lag in lags])
        self._charge(ms)
        return trees

    def drafters(self, requests: Sequence[Request]) -> Sequence[TextDrafter]:
        self._charge(self._cost.milliseconds(self.name))
        return self.inner.drafters(requests)

    def _charge(self, milliseconds: float) -> None:
        self._ms += milliseconds
        self._clock.milliseconds += milliseconds

    def take_ms(self) -> float:
        """What was charged since the last call."""
        ms, self._ms = self._ms, 0.0
        return ms


class AskingAll(FixedPlanner):
    """Asks all proposers for all requests, whatever others have drafted."""

    asks_together = False

    def __init__(self) -> None:
        super().__init__()
        self._requests: Sequence[Request] = ()

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        self._requests = requests
        return 0

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        return list(candidates)


class EndlessKV:
    """A KV cache for the scheduler: there is always room, and nothing is kept."""

    num_blocks = num_available = 1 << 40

    @property
    def pool(self) -> EndlessKV:
        return self

    def open(self, request_id: int, salt: str, adapter: str | None) -> None: ...

    def free(self, request_id: int) -> None: ...

    def reserve(self, request_id: int, num_nodes: int, certain: int = 0) -> bool:
        return True

    def attach_prefix(self, request_id: int, token_ids: Sequence[int], limit: int) -> int:
        return 0


ANY_TOKEN = 1 << 31
"""Size of a vocabulary that has every token id of a trace."""
NO_TIME = DraftingCost({})


@dataclass(slots=True)
class ReplayedTrace:
    """What became of one trace.

    Attributes:
        counters: as an engine keeps them for a request.
        emitted: tokens of each of its verify steps.
        ms: its share of the time: what a step would take without drafts is divided evenly among its
            requests, the rest by their draft nodes. In plain steps if the cost table is relative.
        draft_ms: its share of the drafting, which is in ``ms``.
        wall_ms: of the steps that it took part in, whole.
    """

    counters: SpeculationCounters
    emitted: list[int] = field(default_factory=list)
    ms: float = 0.0
    draft_ms: float = 0.0
    wall_ms: float = 0.0


@dataclass(slots=True)
class ReplayResult:
    """What a replay took.

    Attributes:
        traces: in the order of the traces.
        rows: of each step's forward.
        experts: that each step read; 0 where that is not known.
    """

    traces: list[ReplayedTrace]
    rows: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return sum(trace.ms for trace in self.traces)

    @property
    def draft_ms(self) -> float:
        return sum(trace.draft_ms for trace in self.traces)

    def total(self, counter: str) -> int:
        """A counter of :class:`.engine_stats.SpeculationCounters` over all traces."""
        return sum(getattr(trace.counters, counter) for trace in self.traces)


def replay(
    traces: Sequence[Trace],
    meta: Mapping[str, Any],
    proposers: Sequence[Proposer],
    planner: Planner,
    cost: CostModel,
    *,
    drafting: DraftingCost = NO_TIME,
    concurrency: int = 1,
    config: EngineConfig | None = None,
    unions: ExpertUnions | None = None,
    believed: CostModel | None = None,
) -> ReplayResult:
    """Replay traces as an engine would serve their prompts, all of them waiting from the start.

    Args:
        meta: of the traces; it says how many tokens each might have had.
        proposers: fresh ones; a request's id is the place of its trace.
        planner: a fresh one, for it learns; made with ``believed``.
        cost: frozen; what steps take.
        drafting: fixed times of the proposers; one without takes none.
        concurrency: most requests at a time.
        config: further limits of the engine.
        unions: what steps along the traces read of a mixture; None takes what the table's read.
        believed: what the planner takes steps to cost, and learns of it; None is ``cost``.

    Raises:
        TraceError: a trace has no output, or more than ``meta`` allows.
        ConfigError: ``concurrency`` is out of range.
        ProposerError: a proposer failed, so that the figures are not its own.
    """
    assert not cost.learns, "nothing is measured here that it could learn from"
    limits = replace(config or EngineConfig(), max_num_seqs=concurrency)
    clock = ReplayClock()
    charged = [Charged(each, drafting, clock) for each in proposers]
    loop = _Replay(charged, planner, cost, limits, clock, unions, believed)
    for index, trace in enumerate(traces):
        loop.add(trace_request(index, trace, meta), trace.token_ids.tolist())
    return loop.run()


class _Replay:
    def __init__(
        self,
        proposers: Sequence[Charged],
        planner: Planner,
        cost: CostModel,
        config: EngineConfig,
        clock: ReplayClock,
        unions: ExpertUnions | None,
        believed: CostModel | None,
    ) -> None:
        self._proposers = proposers
        self._cost, self._believed = cost, believed or cost
        self._unions = unions
        self._config = config
        self._kv = EndlessKV()
        self._scheduler = Scheduler(config, cast(KVCache, self._kv), cost)
        self._stats = EngineStats()
        self._drafting = Drafting(proposers, planner, ANY_TOKEN, self._stats, clock)
        self._waiting: deque[Request] = deque()
        self._logs: list[list[int]] = []
        self._result = ReplayResult([])

    def add(self, request: Request, log: list[int]) -> None:
        """Queue a request that is to become ``log``; ids count up from 0."""
        if not request.prompt_len < len(log) <= request.max_len:
            raise TraceError(
                f"trace {request.request_id} has {len(log)} tokens; with its prompt and the limits "
                f"of its traces it must have {request.prompt_len + 1} to {request.max_len}"
            )
        self._waiting.append(request)
        self._logs.append(log)
        self._result.traces.append(ReplayedTrace(request.counters))

    def run(self) -> ReplayResult:
        scheduler, most = self._scheduler, self._config.max_num_seqs
        while self._waiting or scheduler.running:
            # The scheduler gets those that it can admit: it would look at a queue in every step.
            while self._waiting and len(scheduler.running) + len(scheduler.waiting) < most:
                scheduler.add(self._waiting.popleft())
            self._step(scheduler.schedule())
        if self._stats.num_proposer_failures:
            raise ProposerError("a proposer failed in a replay; the log has the reason")
        return self._result

    def _step(self, items: Sequence[Scheduled]) -> None:
        shape = roots = step_shape(items)
        room = self._config.max_num_batched_tokens - roots.rows
        drafts = self._drafting.propose(items, roots, room)
        if drafts:
            self._plan(drafts, room)
            shape = step_shape(items)
        roots, shape = self._counted(roots, items, False), self._counted(shape, items, True)
        forward_ms, draft_ms, merges = self._cost.predict(shape), 0.0, 0
        if drafts:
            merges = self._drafting.planner.drafts.num_merges
        for proposer in self._proposers:
            draft_ms += proposer.take_ms()
        self._result.rows.append(shape.rows)
        self._result.experts.append(shape.experts)
        total_ms = self._share(items, roots, shape, forward_ms, draft_ms, merges)
        emitted = 0
        for item in items:
            emitted += self._commit(item)
        self._believed.observe(shape, forward_ms)
        self._drafting.end(items, shape, emitted, forward_ms, total_ms)

    def _counted(self, shape: StepShape, items: Sequence[Scheduled], drafts: bool) -> StepShape:
        """A step, with or without its drafts, and the experts that it reads.

        Of the rows of a prompt that is not known: such steps read what the table's read.
        """
        if self._unions is None or not all(item.may_draft for item in items):
            return shape
        requests = [(item.request, len(item.draft) if drafts else 0) for item in items]
        places = [(r.request_id, len(r.token_ids) - r.prompt_len, 1 + n) for r, n in requests]
        return shape._replace(experts=self._unions.read(places))

    def _share(
        self,
        items: Sequence[Scheduled],
        roots: StepShape,
        shape: StepShape,
        forward_ms: float,
        draft_ms: float,
        merges: int,
    ) -> float:
        """Charge each request for its part of a step; returns the milliseconds of it all."""
        sizes, count = [len(item.draft.token_ids) for item in items], len(items)
        nodes, drafts = sum(sizes), sum(map(bool, sizes))
        host_ms = self._cost.table.host.of(count, drafts, nodes, draft_ms > 0.0, merges)
        plain_ms = self._cost.predict(roots) if nodes and count > 1 else forward_ms
        node_ms = (forward_ms - plain_ms) / nodes if nodes else 0.0
        for item, size in zip(items, sizes, strict=True):
            trace = self._result.traces[item.request.request_id]
            trace.ms += (plain_ms + draft_ms + host_ms) / count + size * node_ms
            trace.draft_ms += draft_ms / count
            trace.wall_ms += forward_ms + draft_ms + host_ms
        return forward_ms + draft_ms + host_ms

    def _plan(self, drafted: Sequence[Scheduled], room: int) -> None:
        for item, tree in zip(drafted, self._drafting.choose(drafted, room), strict=True):
            item.request.num_pruned_tokens += item.num_drafted - len(tree)
            item.draft = tree

    def _commit(self, item: Scheduled) -> int:
        """Let a request go on as its log says; returns how many tokens it emitted."""
        request, draft = item.request, item.draft
        if not item.samples:
            request.num_computed += item.num_tokens
            return 0
        log, trace = self._logs[request.request_id], self._result.traces[request.request_id]
        verdict = verdict_of(draft, log, len(request.token_ids))
        count = len(verdict.token_ids)
        request.token_ids += verdict.token_ids
        request.num_computed += len(verdict.path) if item.may_draft else item.num_tokens
        count_step(verdict, request.counters)
        trace.emitted.append(count)
        if len(request.token_ids) == len(log):
            ended = len(log) == request.max_len
            request.finish_reason = FinishReason.LENGTH if ended else FinishReason.STOP
        if self._drafting.is_active:
            self._drafting.observe(request, verdict)
        if request.finish_reason is not None:
            self._scheduler.remove(request)
            self._drafting.end_request(request)
        return count


def verdict_of(draft: DraftTree, log: Sequence[int], start: int) -> VerifyResult:
    """What a target makes of a draft if it emits ``log`` from ``start`` on and then ends."""
    if not draft.token_ids:
        return VerifyResult((0,), (log[start],), (TARGET_ORIGIN,), draft)
    nodes = draft.follow(log, start)
    tokens = log[start : start + len(nodes) + 1]
    origins = [draft.origins[node] for node in nodes]
    if len(tokens) > len(nodes):
        origins.append(TARGET_ORIGIN)
    # Where the last token of all was drafted itself, it is no root of another step.
    path = [0, *[node + 1 for node in nodes]][: len(tokens)]
    return VerifyResult(path, tokens, origins, draft)
