"""The best drafts of every step, in hindsight: a bound beside which planners are shown.

Of what the proposers would draft, exactly nodes that are going to be accepted, and of these as many
as pay; who does not bring what is used is not asked. For one request at a time this is the shortest
of all sequences of steps, found backwards from the last token (dynamic programming): over the same
proposers no planner is faster, where no step is cheaper than a narrower one. For several, every
step is the best one at the rate of tokens over all steps, which is found by repetition
(Dinkelbach's method for a ratio).

Knows no model and no files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.config import EngineConfig
from paceline.planner.choice import DraftLimits
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import NO_STEP, StepShape
from paceline.planner.pace import StepReport
from paceline.planner.value import DraftingCost, Source
from paceline.proposers.base import Proposer
from paceline.request.request import Request
from paceline.request.span import DraftTree
from paceline.request.traces import Trace
from paceline_lab.simulate.replay import NO_TIME, AskingAll, ReplayResult, replay
from paceline_lab.trace.experts import ExpertUnions

REPETITIONS = 3
"""Of the search for the rate; it hardly moves after the second."""
Reach = dict[Source, int]
"""How many of its tokens come true, for each proposer that has drafted for a request."""


def best_steps(
    traces: Sequence[Trace],
    meta: Mapping[str, Any],
    proposers: Callable[[], Sequence[Proposer]],
    cost: CostModel,
    *,
    drafting: DraftingCost = NO_TIME,
    concurrency: int = 1,
    config: EngineConfig | None = None,
    unions: ExpertUnions | None = None,
) -> ReplayResult:
    """A replay with the best drafts of every step; see the module's docstring.

    The other arguments, and what is raised, are as in :func:`~paceline_lab.simulate.replay.replay`.
    """
    logs: list[list[int]] = [trace.token_ids.tolist() for trace in traces]

    def run(oracle: _Oracle) -> ReplayResult:
        result = replay(
            traces,
            meta,
            proposers(),
            oracle,
            cost,
            concurrency=concurrency,
            config=config,
            unions=unions,
        )
        for trace, draft_ms in zip(result.traces, oracle.draft_ms, strict=True):
            trace.draft_ms = draft_ms
            trace.ms += draft_ms
        return result

    world = _World(logs, cost, drafting, unions)
    scout = _Scout(world)
    best = run(scout)
    if concurrency == 1:
        lengths = [scout.shortest(index, trace.prompt_len) for index, trace in enumerate(traces)]
        return run(_Planned(world, lengths))
    rate = scout.rate
    for _ in range(REPETITIONS):
        oracle = _Rated(world, rate)
        best = min(best, run(oracle), key=lambda result: result.ms)
        rate = oracle.rate
    return best


class _World(NamedTuple):
    """What every oracle knows: the whole texts, and what steps and drafts take."""

    logs: Sequence[list[int]]
    cost: CostModel
    drafting: DraftingCost
    unions: ExpertUnions | None


class _Oracle(AskingAll, ABC):
    """Asks everybody, and verifies of each request's accepted path as much as a subclass says."""

    def __init__(self, world: _World) -> None:
        super().__init__()
        self._logs, self.cost, self.drafting, self._unions = world
        self.draft_ms = [0.0] * len(world.logs)
        self._step: StepShape = NO_STEP
        self._reaches: list[Reach] = []
        self._step_draft_ms = 0.0
        self._tokens, self._ms = 0, 0.0

    @abstractmethod
    def lengths(
        self, requests: Sequence[Request], reaches: Sequence[Reach], most: int
    ) -> tuple[list[int], float]:
        """Nodes to verify for each request, ``most`` in all, and milliseconds of drafting them."""

    @property
    def rate(self) -> float:
        """Tokens per millisecond over the steps in which no prompt was read."""
        return self._tokens / self._ms if self._ms else 0.0

    def _growth(
        self, step: StepShape, places: Sequence[tuple[int, int]], count: int
    ) -> list[float]:
        """Milliseconds of a step with 0 to ``count`` nodes, at places of the traces' answers."""
        if self._unions is None or len(places) < step.requests:
            return self.cost.growth(step, count)
        return self.cost.growth(step, count, self._unions.growth(places, count))

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        self._step = step
        self._reaches = [{} for _ in requests]
        self._step_draft_ms = 0.0
        return super().begin(step, requests)

    def drafted(self, source: Source, chosen: Sequence[int], milliseconds: float) -> None:
        for i in chosen:
            for tree in self.drafts.trees(i):
                if tree.origins[0] == source.name and (nodes := self._accepted(i, tree)):
                    self._reaches[i][source] = len(nodes)

    def _accepted(self, index: int, tree: DraftTree) -> list[int]:
        request = self._requests[index]
        return tree.follow(self._logs[request.request_id], len(request.token_ids))

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        lengths, draft_ms = self.lengths(self._requests, self._reaches, node_budget)
        self._step_draft_ms = draft_ms
        for request in self._requests:
            self.draft_ms[request.request_id] += draft_ms / len(self._requests)
        trees = map(self.drafts.tree, range(len(lengths)))
        return [
            tree.select(self._accepted(i, tree)[:length])
            for i, (tree, length) in enumerate(zip(trees, lengths, strict=True))
        ]

    def end(self, report: StepReport) -> None:
        if report.num_decoding == report.shape.requests:
            self._tokens += report.num_emitted
            self._ms += report.total_ms + self._step_draft_ms


class _Scout(_Oracle):
    """Verifies nothing, and notes what could have been verified at every length of a request."""

    def __init__(self, world: _World) -> None:
        super().__init__(world)
        self._seen: list[dict[int, list[float]]] = [{} for _ in world.logs]

    def lengths(
        self, requests: Sequence[Request], reaches: Sequence[Reach], most: int
    ) -> tuple[list[int], float]:
        ask_ms, call_ms = self.cost.table.host.ask, self.drafting.milliseconds
        for request, reach in zip(requests, reaches, strict=True):
            reached = [(source.name, count) for source, count in reach.items()]
            times = [
                ask_ms + min([call_ms(name, n) for name, count in reached if count >= n])
                for n in range(1, min(most, max(reach.values(), default=0)) + 1)
            ]
            self._seen[request.request_id][len(request.token_ids)] = [0.0, *times]
        return [0] * len(requests), 0.0

    def shortest(self, index: int, prompt_len: int) -> dict[int, tuple[int, float]]:
        """By length of the request: nodes of the shortest way to its end, and their drafting."""
        end = len(self._logs[index])
        best: dict[int, tuple[int, float]] = {}
        to_go = {end: 0.0}
        for length in range(end - 1, prompt_len - 1, -1):
            times = self._seen[index].get(length, [0.0])
            root = StepShape(1, length - 1, length - 1, 1)
            forwards = self._growth(root, [(index, length - prompt_len)], len(times))
            host = self.cost.table.host
            ways = [
                (forwards[n] + host.of(1, n > 0, n) + ms + to_go[min(end, length + n + 1)], n, ms)
                for n, ms in enumerate(times)
            ]
            to_go[length], nodes, draft_ms = min(ways)
            best[length] = nodes, draft_ms
        return best


class _Planned(_Oracle):
    """Verifies what :meth:`_Scout.shortest` found."""

    def __init__(self, world: _World, plans: Sequence[Mapping[int, tuple[int, float]]]) -> None:
        super().__init__(world)
        self._plans = plans

    def lengths(
        self, requests: Sequence[Request], reaches: Sequence[Reach], most: int
    ) -> tuple[list[int], float]:
        plans = [self._plans[r.request_id][len(r.token_ids)] for r in requests]
        return [nodes for nodes, _ in plans], sum(ms for _, ms in plans)


class _Rated(_Oracle):
    """Verifies in each step what pays best where a millisecond is worth ``price`` tokens."""

    def __init__(self, world: _World, price: float) -> None:
        super().__init__(world)
        self._price = price

    def lengths(
        self, requests: Sequence[Request], reaches: Sequence[Reach], most: int
    ) -> tuple[list[int], float]:
        nobody = [0] * len(requests)
        best, chosen, draft_ms = 0.0, nobody, 0.0
        count = sum(max(r.values(), default=0) for r in reaches)
        places = [(r.request_id, len(r.token_ids) - r.prompt_len) for r in requests]
        growth, host = self._growth(self._step, places, count), self.cost.table.host
        plain_host_ms = host.of(len(requests), 0)
        for options, ms in self._options(reaches):
            total = min(most, sum(options))
            for count in range(1, total + 1):
                dealt_out = dealt(options, count)
                host_ms = host.of(len(requests), sum(map(bool, dealt_out)), count)
                ms_more = growth[count] - growth[0] + host_ms - plain_host_ms + ms
                gain = count - self._price * ms_more
                if gain > best:
                    best, chosen, draft_ms = gain, dealt_out, ms
        return chosen, draft_ms

    def _options(self, reaches: Sequence[Reach]) -> list[tuple[list[int], float]]:
        """What can be had of each request, and at what price: with one costly proposer at most."""
        sources = {source for reach in reaches for source in reach}
        free = [source for source in sources if not source.costs_forwards]
        base = [max((reach.get(s, 0) for s in free), default=0) for reach in reaches]
        base_ms = self.cost.table.host.ask
        base_ms += sum(self.drafting.milliseconds(source.name) for source in free)
        options = [(base, base_ms)]
        for source in sources - set(free):
            depths = [reach.get(source, 0) for reach in reaches]
            for depth in range(1, max(depths) + 1):
                have = [max(b, min(d, depth)) for b, d in zip(base, depths, strict=True)]
                options.append((have, base_ms + self.drafting.milliseconds(source.name, depth)))
        return options


def dealt(have: Sequence[int], count: int) -> list[int]:
    """``count`` nodes dealt out level by level, to each request no more than it has."""
    dealt = [0] * len(have)
    level = 0
    while count:
        level += 1
        for i, most in enumerate(have):
            if most >= level and count:
                dealt[i] += 1
                count -= 1
    return dealt
