"""A planned step as a record, and summaries of a run's records per proposer.

A record says what was drafted, what of it was cut and why, and what came of it. Knows no text and
no screen.

:class:`RecordingPlanner` stands in for a planner and passes every call on. It makes a record in the
last call of a step, which no clock of engine or planner measures. Why a node was left out is what
the planner would have chosen without one of its rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, cast

from paceline.engine.engine import Engine
from paceline.engine.statistics import from_disk
from paceline.planner.choice import DraftLimits, choose_nodes
from paceline.planner.cost_table import StepShape
from paceline.planner.drafts import Prices
from paceline.planner.pace import StepReport
from paceline.planner.planner import CostAwarePlanner, Planner
from paceline.planner.value import Source
from paceline.request.request import Request, VerifyResult
from paceline.request.span import ROOT, DraftTree


class Cut(StrEnum):
    """Why a candidate node was not verified."""

    DEPTH = "depth"
    """Deeper than the request may draft."""
    PROBABILITY = "probability"
    """Less likely to be reached and accepted than the proposers' least."""
    COUNT = "count"
    """The request or the step has as many nodes as it may have."""
    COST = "cost"
    """It does not bring what its time is worth."""
    FAIRNESS = "fairness"
    """It would pay, but make some request of the step too slow."""
    DROPPED = "dropped"
    """It was chosen, but there was no memory for it or the step was run again plainly."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A candidate node of a draft tree.

    Attributes:
        parent: place of its parent in the request's nodes, -1 below the last committed token.
        accept_prob: the planner's estimate that it is accepted, given that its parent is.
        path_prob: the product of these along its path.
        cut: why it was not verified; None where it was.
        is_right: whether the target emitted its token there; None where that is not known, because
            its parent was not accepted.
    """

    token_id: int
    parent: int
    depth: int
    origin: str
    accept_prob: float
    path_prob: float
    cut: Cut | None
    is_right: bool | None

    @property
    def is_accepted(self) -> bool:
        return self.cut is None and self.is_right is True


@dataclass(frozen=True, slots=True)
class RequestPart:
    """One request's part in a step.

    Attributes:
        position: tokens before the step, the prompt's included.
        token_ids: emitted by the step.
        nodes: candidates, parents first; empty where nothing was drafted.
    """

    request_id: int
    position: int
    token_ids: Sequence[int]
    nodes: Sequence[NodeRecord] = ()


@dataclass(slots=True)
class AskedProposer:
    """A proposer in a step.

    Attributes:
        num_asked, num_passed_over: requests for which it was to draft, and for which it was judged
            not to pay.
        node_price, level_price: expected tokens that the first node, and each level, must bring.
        milliseconds: of its drafting.
        num_nodes: that it drafted, over all requests.
    """

    origin: str
    num_asked: int
    num_passed_over: int
    node_price: float = 0.0
    level_price: float = 0.0
    milliseconds: float = 0.0
    num_nodes: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the whole batch.

    Attributes:
        index: from 0, over all steps that were recorded.
        shape: of the forward that ran, draft nodes included.
        asks: proposers with requests to draft for.
        requests: that decoded.
        growth: milliseconds of the forward with 0, 1, 2, ... of the candidates, as predicted; empty
            where no cost was looked at.
        rate: expected tokens that a millisecond has to bring.
        predicted_ms: of the forward that ran, before it ran; None where no cost was looked at.
        forward_ms, total_ms: as measured, of the forward and of the whole step.
        num_decoding, num_emitted: requests that decoded, and tokens that these emitted.
        disk_bytes, disk_ms: of weights that came from disk since the step before, and the time that
            the forward waited for them.
    """

    index: int
    shape: StepShape
    asks: Sequence[AskedProposer]
    requests: Sequence[RequestPart]
    growth: Sequence[float]
    rate: float
    predicted_ms: float | None
    forward_ms: float
    total_ms: float
    num_decoding: int
    num_emitted: int
    disk_bytes: int = 0
    disk_ms: float = 0.0

    @property
    def nodes(self) -> list[NodeRecord]:
        return [node for part in self.requests for node in part.nodes]

    @property
    def num_verified(self) -> int:
        return sum(node.cut is None for node in self.nodes)

    @property
    def num_accepted(self) -> int:
        return sum(node.is_accepted for node in self.nodes)

    @property
    def next_node(self) -> tuple[float, float] | None:
        """What one node more would bring and cost, in tokens, where that ended the choice."""
        after = self.num_verified + 1
        worths = [node.path_prob for node in self.nodes if node.cut is Cut.COST]
        is_fairness = any(node.cut is Cut.FAIRNESS for node in self.nodes)
        if is_fairness or not worths or after >= len(self.growth):
            return None
        return max(worths), self.rate * (self.growth[after] - self.growth[after - 1])


@dataclass(slots=True)
class ProposerSummary:
    """One proposer over all steps, or several that are asked together.

    Attributes:
        num_asked, num_passed_over: requests, counted once per step.
        milliseconds: of drafting.
        num_drafted: nodes, before what two proposers both drafted was merged.
        num_candidates, num_verified, num_accepted: nodes, counted where it was the surest.
        num_labelled, num_right: of the candidates, those whose truth is known, and that were right.
        expected: of the labelled ones, as many as were estimated to be right.
    """

    origin: str
    num_asked: int = 0
    num_passed_over: int = 0
    milliseconds: float = 0.0
    num_drafted: int = 0
    num_candidates: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_labelled: int = 0
    num_right: int = 0
    expected: float = 0.0


def summarise(records: Sequence[StepRecord]) -> list[ProposerSummary]:
    """One summary per proposer and group, in the order in which they were first considered."""
    summaries: dict[str, ProposerSummary] = {}
    for record in records:
        for asked in record.asks:
            summary = summaries.setdefault(asked.origin, ProposerSummary(asked.origin))
            summary.num_asked += asked.num_asked
            summary.num_passed_over += asked.num_passed_over
            summary.milliseconds += asked.milliseconds
            summary.num_drafted += asked.num_nodes
    nodes = [node for record in records for node in record.nodes]
    for node in nodes:  # those that draft from texts are asked together
        summaries.setdefault(node.origin, ProposerSummary(node.origin))
    for origin, summary in summaries.items():
        own = [node for node in nodes if node.origin == origin]
        summary.num_candidates = len(own)
        summary.num_verified = sum(node.cut is None for node in own)
        summary.num_accepted = sum(node.is_accepted for node in own)
        labelled = [node for node in own if node.is_right is not None]
        summary.num_labelled = len(labelled)
        summary.num_right = sum(node.is_right is True for node in labelled)
        summary.expected = sum(node.accept_prob for node in labelled)
    return list(summaries.values())


def cost_error(records: Sequence[StepRecord]) -> float | None:
    """Median over steps of |predicted - measured| / measured forward time; None without any."""
    errors = sorted(
        abs(record.predicted_ms - record.forward_ms) / record.forward_ms
        for record in records
        if record.predicted_ms is not None and record.forward_ms > 0.0
    )
    return errors[len(errors) // 2] if errors else None


MAX_STEPS = 10_000
"""The latest steps, which are kept."""


class Terms(NamedTuple):
    """As in :class:`StepRecord`; empty where a plan does not look at costs."""

    growth: Sequence[float] = ()
    rate: float = 0.0


def request_nodes(
    tree: DraftTree, reasons: Sequence[Cut | None], emitted: Sequence[int]
) -> list[NodeRecord]:
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
    return [NodeRecord(*row) for row in zip(*columns, strict=True)]


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

    reasons_of_all = []
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
        reasons_of_all.append(reasons)
    return reasons_of_all


def _places(tree: DraftTree, part: DraftTree) -> list[int]:
    """Where the nodes of a part stand in its tree: no two siblings carry one token."""
    place = {key: i for i, key in enumerate(zip(tree.parents, tree.token_ids, strict=True))}
    places: list[int] = []
    for parent, token in zip(part.parents, part.token_ids, strict=True):
        places.append(place[ROOT if parent < 0 else places[parent], token])
    return places


@dataclass(slots=True)
class _PlannedStep:
    """What is known of the step that is under way."""

    shape: StepShape | None = None
    requests: Sequence[Request] = ()
    positions: Sequence[int] = ()
    asks: list[AskedProposer] = field(default_factory=list)
    drafted: int = 0
    trees: Sequence[DraftTree] = ()
    limits: Sequence[DraftLimits] = ()
    node_budget: int = 0
    kept: float = 1.0
    chosen: Sequence[DraftTree] = ()
    verified: dict[int, DraftTree] = field(default_factory=dict)


Disk = Callable[[], tuple[int, float]]


class RecordingPlanner:
    """A planner that decides as ``inner`` does and keeps a record of every step.

    Steps for which ``inner`` need not be asked are counted here, so that the engine reports each.

    Args:
        disk: bytes of weights that were read from disk so far, and seconds that forwards waited for
            them.

    Attributes:
        steps: the latest :data:`MAX_STEPS` records, the oldest first.
    """

    def __init__(self, inner: Planner, disk: Disk = lambda: (0, 0.0)) -> None:
        self.inner = inner
        self._disk, self._seen = disk, disk()
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self._step = _PlannedStep()
        self._asleep = 0, list[int]()  # for how many steps, while who decodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        positions = [len(request.token_ids) for request in requests]
        self._step = _PlannedStep(step, list(requests), positions)
        steps, before = self._asleep
        now = [request.request_id for request in requests]
        if not steps or now != before or not self.inner.sleeps(requests):
            steps = self.inner.begin(step, requests)
        self._asleep = max(0, steps - 1), now
        return min(steps, 1)

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        chosen = self.inner.ask(source, candidates)
        num_asked = len(chosen)
        self._step.asks.append(AskedProposer(source.name, num_asked, len(candidates) - num_asked))
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
        step, drafts = self._step, self.inner.drafts
        if isinstance(self.inner, CostAwarePlanner):
            step.kept = self.inner.kept
        chosen = self.inner.choose(limits, node_budget)
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
        step, self._step = self._step, _PlannedStep()
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
        return Terms(planned.growth or [plain_ms], planned.rate / self._step.kept)


def _record(index: int, step: _PlannedStep, terms: Terms, report: StepReport) -> StepRecord:
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


def _parts(step: _PlannedStep, terms: Terms) -> list[RequestPart]:
    """What became of each request that decoded."""
    emitted = [
        request.token_ids[position:]
        for request, position in zip(step.requests, step.positions, strict=True)
    ]
    ids = [request.request_id for request in step.requests]
    nodes: list[list[NodeRecord]] = [[]] * len(ids)
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
