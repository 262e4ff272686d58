"""Records what a planner was given, what it answered and what came of it, without taking part.

:class:`RecordingPlanner` stands in for a planner and passes every call on. What a step leaves
behind is worked out in its last call, which no clock of engine or planner sees. Why a node was left
out is found by asking the planner's own choice what it would have chosen without one of its rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from paceline.engine.engine import Engine, from_disk
from paceline.planner.cost_table import StepShape
from paceline.planner.drafts import DraftLimits, Prices, choose_nodes
from paceline.planner.pace import StepReport
from paceline.planner.planner import CostAwarePlanner, Planner
from paceline.planner.value import Source
from paceline.profiling.explain_steps import Asked, Cut, Node, RequestPart, StepRecord
from paceline.request.request import Request, VerifyResult
from paceline.request.span import ROOT, DraftTree

MAX_STEPS = 10_000
"""The latest steps, which are kept."""


@dataclass(frozen=True, slots=True)
class Terms:
    """By what the nodes of a step were chosen; all zero where a plan does not look at costs.

    Attributes:
        growth: milliseconds of the forward with 0, 1, 2, ... draft nodes.
        rate: tokens that a millisecond is worth.
    """

    growth: Sequence[float] = ()
    rate: float = 0.0


def request_nodes(
    tree: DraftTree, reasons: Sequence[Cut | None], emitted: Sequence[int]
) -> list[Node]:
    """The nodes of a tree; ``reasons`` is parallel to them."""
    known = dict(tree.outcomes(emitted))
    columns = (
        tree.token_ids,
        tree.parents,
        tree.depths(),
        tree.origins,
        tree.accept_probs,
        tree.path_probs(),
        reasons,
        [known.get(node) for node in range(len(tree))],
    )
    return [Node(*row) for row in zip(*columns, strict=True)]


def cut_reasons(
    trees: Sequence[DraftTree],
    chosen: Sequence[DraftTree],
    verified: Sequence[DraftTree],
    limits: Sequence[DraftLimits],
    node_budget: int,
    terms: Terms,
) -> list[list[Cut | None]]:
    """Why each node was left out, found by asking what would be chosen if a rule did not hold.

    Args:
        trees: what there was to choose from, one per request; the others are parallel to it.
        chosen, verified: parts of ``trees``.
    """
    growth = terms.growth or [0.0] * (1 + sum(map(len, trees)))

    def choose(rate: float) -> list[list[int]]:
        return choose_nodes(trees, limits, growth, rate, node_budget=node_budget)

    found = []
    for tree, *parts, limit, allowed, paying in zip(
        trees, chosen, verified, limits, choose(0.0), choose(terms.rate), strict=True
    ):
        picked, run = (set(_places(tree, part)) for part in parts)
        reasons: list[Cut | None] = [
            Cut.DEPTH
            if depth > limit.max_depth
            else Cut.PROBABILITY
            if prob < limit.min_path_prob
            else Cut.COUNT
            for depth, prob in zip(tree.depths(), tree.path_probs(), strict=True)
        ]
        for node in allowed:
            reasons[node] = Cut.COST
        for node in paying:
            reasons[node] = Cut.FAIRNESS if terms.growth else Cut.COUNT
        for node in picked:
            reasons[node] = None if node in run else Cut.DROPPED
        found.append(reasons)
    return found


def _places(tree: DraftTree, part: DraftTree) -> list[int]:
    """Where the nodes of a part stand in its tree: no two siblings carry one token."""
    place = {key: i for i, key in enumerate(zip(tree.parents, tree.token_ids, strict=True))}
    found: list[int] = []
    for parent, token in zip(part.parents, part.token_ids, strict=True):
        found.append(place[ROOT if parent < 0 else found[parent], token])
    return found


@dataclass(slots=True)
class _Step:
    """What is known of the step that is under way."""

    shape: StepShape | None = None
    requests: Sequence[Request] = ()
    positions: Sequence[int] = ()
    asks: list[Asked] = field(default_factory=list)
    drafted: int = 0
    trees: Sequence[DraftTree] = ()
    limits: Sequence[DraftLimits] = ()
    node_budget: int = 0
    chosen: Sequence[DraftTree] = ()
    verified: dict[int, DraftTree] = field(default_factory=dict)


Disk = Callable[[], tuple[int, float]]


class RecordingPlanner:
    """A planner that decides as ``inner`` does and keeps a record of every step.

    A planner that learns from a clock sees the microseconds of noting things down while it plans.
    Steps for which it need not be asked are counted here, so that the engine reports each of them.

    Args:
        disk: bytes of weights that were read from disk so far, and seconds that forwards waited for
            them.

    Attributes:
        inner: who decides; calls that tell nothing about a step go straight to it.
        steps: the records, the oldest first; of the latest :data:`MAX_STEPS`.
    """

    def __init__(self, inner: Planner, disk: Disk = lambda: (0, 0.0)) -> None:
        self.inner = inner
        self._disk, self._seen = disk, disk()
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self._step = _Step()
        self._asleep = 0, list[int]()  # for how many steps, while who decodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        positions = [len(request.token_ids) for request in requests]
        self._step = _Step(step, list(requests), positions)
        steps, before = self._asleep
        now = [request.request_id for request in requests]
        if not steps or now != before or self.inner.wakes(requests):
            steps = self.inner.begin(step, requests)
        self._asleep = max(0, steps - 1), now
        return min(steps, 1)

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        chosen = self.inner.ask(source, candidates)
        num_asked = len(chosen)
        self._step.asks.append(Asked(source.name, num_asked, len(candidates) - num_asked))
        return chosen

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        prices = self.inner.prices(source, chosen, max_nodes)
        asked = self._step.asks[-1]
        asked.node_price = prices.nodes[0] if prices.nodes else 0.0
        asked.level_price = prices.level
        return prices

    def drafted(self, source: Source, chosen: Sequence[int], milliseconds: float) -> None:
        self.inner.drafted(source, chosen, milliseconds)
        step = self._step
        num_nodes = sum(self.inner.drafts.sizes())
        step.asks[-1].milliseconds, step.asks[-1].num_nodes = milliseconds, num_nodes - step.drafted
        step.drafted = num_nodes

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        chosen = self.inner.choose(limits, node_budget)
        step, drafts = self._step, self.inner.drafts
        step.trees = [drafts.tree(index) for index in range(len(limits))]
        step.limits, step.node_budget = limits, node_budget
        step.chosen = chosen
        return chosen

    def observe(self, request: Request, result: VerifyResult) -> None:
        self.inner.observe(request, result)
        self._step.verified[request.request_id] = result.draft

    def end(self, report: StepReport) -> None:
        terms = self._terms()
        self.inner.end(report)
        step, self._step = self._step, _Step()
        (seen, waited), self._seen = self._seen, self._disk()
        came, waited_ms = self._seen[0] - seen, (self._seen[1] - waited) * 1e3
        record = _record(self._num_steps, step, terms, report)
        self.steps.append(replace(record, disk_bytes=came, disk_ms=waited_ms))
        self._num_steps += 1

    def _terms(self) -> Terms:
        if self._step.shape is None or not isinstance(self.inner, CostAwarePlanner):
            return Terms()
        planned = self.inner.planned
        plain_ms = self.inner.cost.predict(self._step.shape)
        return Terms(planned.growth or [plain_ms], planned.rate)


def _record(index: int, step: _Step, terms: Terms, report: StepReport) -> StepRecord:
    growth = list(terms.growth[: 1 + sum(map(len, step.trees))])
    num_nodes = report.shape.rows - step.shape.rows if step.shape else 0
    return StepRecord(
        index=index,
        shape=report.shape,
        asks=step.asks,
        requests=_parts(step, terms),
        growth=growth,
        rate=terms.rate,
        predicted_ms=growth[num_nodes] if 0 <= num_nodes < len(growth) else None,
        forward_ms=report.forward_ms,
        total_ms=report.total_ms,
        num_decoding=report.num_decoding,
        num_emitted=report.num_emitted,
    )


def _parts(step: _Step, terms: Terms) -> list[RequestPart]:
    """What became of each request that decoded."""
    emitted = [
        request.token_ids[position:]
        for request, position in zip(step.requests, step.positions, strict=True)
    ]
    ids = [request.request_id for request in step.requests]
    nodes: list[list[Node]] = [[] for _ in ids]
    if step.trees:
        verified = [step.verified.get(i, tree) for i, tree in zip(ids, step.chosen, strict=True)]
        reasons = cut_reasons(
            step.trees, step.chosen, verified, step.limits, step.node_budget, terms
        )
        nodes = [request_nodes(*each) for each in zip(step.trees, reasons, emitted, strict=True)]
    return [RequestPart(*part) for part in zip(ids, step.positions, emitted, nodes, strict=True)]


@contextmanager
def recording(engine: Engine) -> Iterator[RecordingPlanner]:
    """Record the steps that an engine takes meanwhile. Call it where the engine lives."""
    recorder = RecordingPlanner(engine.drafting.planner, lambda: from_disk(engine.runner))
    engine.drafting.planner = cast(Planner, recorder)
    try:
        yield recorder
    finally:
        engine.drafting.planner = recorder.inner
