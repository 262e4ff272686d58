"""The planners: which proposers a step asks for drafts, and which draft nodes it verifies.

:class:`CostAwarePlanner` maximises, over all draft nodes of all requests at once,

    sum of path probabilities - rate * (T(step + nodes) - T(step))

with T from the cost model, path probabilities from the calibration, and as the price of time the
rate at which the engine makes tokens. Nothing that is decided here can change a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any, Protocol

from paceline.config import Objective
from paceline.planner import drafts
from paceline.planner.acceptance import Promise
from paceline.planner.choice import DraftLimits, cheapest_ahead
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import StepShape
from paceline.planner.drafts import FREE, Drafts, Prices
from paceline.planner.pace import Credits, Pace, StepReport
from paceline.planner.value import UNPLANNED, Asking, Exploration, PlannedStep, Source
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree
from paceline.sampling.sampler import kernels

SLOWDOWN = 0.03
"""Share of its plain speed that a request may lose to its neighbours' drafts in the long run."""
MAX_NODES, NODES_PER_REQUEST = 64, 8
"""Draft nodes of a step, or of each request in a large batch, that are considered."""
MOST_NODES, NEARLY_FREE = 256, 1.5
"""Considered instead where :data:`MAX_NODES` make a step less than this many times as long, as they
do where weights are read from disk meanwhile."""
PLAIN_DOUBT = 0.13
"""Standard deviation of the logarithm of a plain step's time beyond which one is to be seen."""
MAX_SKIPPED = 64
"""Most steps for which the planner need not be asked."""
THOUGHT_MS = 0.1
"""Approximate time of a second choice."""


class Planner(Protocol):
    """Decides for each step who drafts, for how much, and which nodes are verified.

    A step calls :meth:`begin`; :meth:`ask`, :meth:`prices` and :meth:`drafted` once per source;
    :meth:`choose`; and, when it has committed, :meth:`observe` per request and :meth:`end`.
    Requests are known by their place in what :meth:`begin` was given; what is drafted for them is
    added to :attr:`drafts`.
    """

    drafts: Drafts
    asks_together: bool = True
    """All proposers that draft from texts are one source, which is asked once for all of them."""

    def set_sources(self, sources: Sequence[Source]) -> None:
        """Other proposers draft from now on.

        What was learnt of a proposer is kept only if all former sources are among these, because
        one of the same name may be another proposer.
        """
        return

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        """Look at the requests that decode, given the shape of what will be forwarded anyway.

        Returns:
            0 where proposers are to be asked. Otherwise the number of steps, this one included, for
            which the planner need not be called, as long as the same requests decode and
            :meth:`sleeps` does not return 0.
        """
        ...

    def sleeps(self, requests: Sequence[Request]) -> int:
        """For how many of the steps that :meth:`begin` skips no text can come to where a draft may
        pay; 0 where one has."""
        ...

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        """For which of the candidates a source drafts; others may have drafted for them already."""
        ...

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        """What the further work of a source that costs forwards has to be worth.

        Args:
            max_nodes: that it may draft for all the chosen requests together.
        """
        ...

    def drafted(self, source: Source, chosen: Sequence[int], milliseconds: float) -> None:
        """Learn how long a source took for these requests, whose drafts are there now."""
        return

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        """The trees to verify: prefix-closed parts of what was drafted, the best path first."""
        ...

    def observe(self, request: Request, result: VerifyResult) -> None:
        """Learn from what a step emitted in which proposers were asked."""
        return

    def end(self, report: StepReport) -> None:
        """Learn from a step as a whole, or from several for which the planner was not asked."""
        return

    def finish(self, request: Request) -> None:
        """Forget a request."""
        return


class FixedPlanner(Planner):
    """Asks all proposers and takes the likeliest nodes up to fixed caps, at any cost.

    A proposer that costs forwards is not asked where others expect to bring a token already.

    Args:
        drafts: None is those in Python, with the estimates that proposers have themselves.
    """

    def __init__(self, drafts: Drafts | None = None) -> None:
        self.drafts = drafts or Drafts(calibrates=False)

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        return 0

    def sleeps(self, requests: Sequence[Request]) -> int:
        return 1

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        if not source.costs_forwards:
            return list(candidates)
        return [i for i in candidates if self.drafts.expected(i) < 1.0]

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        return FREE

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        no_time = [0.0] * (1 + sum(self.drafts.sizes()))
        self.drafts.choose(limits, no_time, 0.0, node_budget=node_budget)
        return self.drafts.chosen()


class CostAwarePlanner(Planner):
    """The draft that pays best on this machine, for each step of the whole batch.

    Args:
        cost: shared with the engine, which teaches it.
        drafts: None is those in Python.
    """

    def __init__(
        self, cost: CostModel, objective: Objective | None = None, drafts: Drafts | None = None
    ) -> None:
        self.cost = cost
        self.objective = objective or Objective()
        self.drafts = drafts or Drafts()
        self._pace = Pace(cost.table.host)
        self._asking, self._promise = Asking(self._pace, self.drafts, cost), Promise()
        is_strict = self.objective.kind == "latency"
        self._credits = None if is_strict else Credits()
        self._wide = WideSteps(cost, self._asking.exploration, is_strict)
        self._step = self.planned = UNPLANNED
        """The step that is open, and the latest one, for whatever shows how it was planned."""

    @property
    def num_requests(self) -> int:
        """Requests of which something is kept."""
        return 0 if self._credits is None else len(self._credits)

    @property
    def kept(self) -> float:
        """Share of what drafts promise that the target is expected to accept."""
        return self._promise.kept

    def set_sources(self, sources: Sequence[Source]) -> None:
        self._asking.set_sources(sources)

    # --- before drafting -----------------------------------------------------------------------

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        self._step = self.planned = UNPLANNED
        plain_ms = self.cost.predict(step)
        rate = self._rate(step, len(requests), plain_ms)
        planned = PlannedStep(step, requests, plain_ms=plain_ms, rate=rate)
        if not any(map(attrgetter("is_forced"), requests)):
            if step.requests == len(requests) and self.cost.deviation(step) > PLAIN_DOUBT:
                # An engine that always speculates never sees what it is compared with.
                return 1
            pause_ms = self._asking.pause_ms(planned)
            if pause_ms > 0.0:
                longest_ms = MAX_SKIPPED * self._pace.plain_ms(plain_ms)
                return max(1, int(MAX_SKIPPED * min(1.0, pause_ms / longest_ms)))
        self._step = self.planned = planned
        planned.slowdown = self._slowdown(plain_ms)
        if len(requests) > 1:
            credits, none = self._credits, [0.0] * len(requests)
            planned.ahead = none if credits is None else credits.ahead(requests)
        return 0

    def _slowdown(self, plain_ms: float) -> float:
        """Share of its plain speed that a request may lose to the drafts of others."""
        tpot_ms = self.objective.tpot_ms
        if tpot_ms is not None:
            return max(0.0, 1.0 - self._pace.plain_ms(plain_ms) / tpot_ms)
        return SLOWDOWN if self._credits is not None else 0.0

    def sleeps(self, requests: Sequence[Request]) -> int:
        return self._asking.sleeps(requests)

    def _rate(self, step: StepShape, decoding: int, plain_ms: float) -> float:
        """The value of time is that of decoding alone: a prefill chunk does not lower it."""
        if step.requests > decoding:
            seen = decoding * step.context_sum / step.requests
            plain_ms = self.cost.predict(StepShape(decoding, seen, seen, decoding, decoding))
        return self._pace.tokens_per_ms(decoding, plain_ms)

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        return self._asking.ask(self._step, source, candidates)

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        step = self._step
        requests = [step.requests[i] for i in chosen]
        drafts, name = self.drafts, source.name

        def estimate(index: int, depth: int, prob: float) -> float:
            request = requests[index]
            if request.is_forced:
                return inf
            return drafts.estimate(request.request_id, name, depth, prob)

        growth = self._growth(max_nodes)[: max_nodes + 1]
        growth = self._wide.growth(step, growth)
        return Prices(
            nodes=[step.rate * ms for ms in cheapest_ahead(growth)],
            level=step.rate * self._asking.times.of(name).level,
            estimate=estimate,
        )

    def _growth(self, max_nodes: int) -> Sequence[float]:
        step = self._step
        count = min(max_nodes, max(MAX_NODES, NODES_PER_REQUEST * len(step.requests)))
        if len(step.growth) <= count:
            step.forwards = self.cost.growth(step.shape, count)
            if count < max_nodes and step.forwards[-1] < NEARLY_FREE * step.forwards[0]:
                step.forwards = self.cost.growth(step.shape, MOST_NODES)
            plain_ms, *further = step.forwards
            extra_ms = self._pace.draft_ms(len(step.requests))
            step.growth = [plain_ms, *[ms + extra_ms for ms in further]]
        return step.growth

    # --- after drafting ------------------------------------------------------------------------

    def drafted(self, source: Source, chosen: Sequence[int], milliseconds: float) -> None:
        step, levels = self._step, 1
        has_levels = source.costs_forwards and source.costs_levels
        if has_levels:
            levels = self.drafts.depth(source.name)
        self._asking.drafted(step, source, levels, milliseconds, has_levels)
        if has_levels:
            step.levels, step.level_ms = levels, self._asking.times.of(source.name).level
        step.draft_ms += milliseconds

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        step, drafts = self._step, self.drafts
        drafted = sum(drafts.sizes())
        kept = self._promise.kept
        pick = partial(
            drafts.choose,
            limits,
            rate=step.rate / kept,
            slowdown=step.slowdown,
            ahead=step.ahead,
            node_budget=node_budget,
        )
        count = pick(self._growth(drafted))
        if count:
            # What each source's nodes promise beyond the time in which they are verified.
            longest = min(count, len(step.growth) - 1)
            price = step.rate * (step.growth[longest] - step.growth[0]) / count
            for asked in step.asks:
                for lesson in asked.lessons:
                    lesson.gain = kept * drafts.gain(asked.name, lesson.indices, price / kept)
        self._wide.widen(step, drafts, count, drafted, pick)
        return drafts.chosen()

    # --- after the step ------------------------------------------------------------------------

    def observe(self, request: Request, result: VerifyResult) -> None:
        if self._step is not UNPLANNED:
            self.drafts.learn(request.request_id, result.token_ids)
            if result.draft.token_ids and not request.is_forced:
                self._promise.observe(sum(result.draft.path_probs()), len(result.path) - 1)
        if self._credits is not None:
            self._credits.emitted(request, len(result.token_ids))

    def end(self, report: StepReport) -> None:
        step, self._step = self._step, UNPLANNED
        self.planned = step
        self._asking.exploration.passed(report.total_ms)
        self._promise.passed(report.num_steps)
        plain_ms = report.forward_ms / report.num_steps
        if step is not UNPLANNED:
            self._wide.end(step, report)
            plain_ms = step.plain_ms if report.shape.rows > step.shape.rows else plain_ms
        if report.shape.requests == report.num_decoding and report.total_ms > 0.0:
            self._pace.observe(report, plain_ms, step.draft_ms, bool(step.asks))
        self._asking.learn(step)
        if self._credits is not None:
            longer = self._longer(step, report.shape)
            self._credits.passed(1.0 + longer, self._slowdown(plain_ms), report.num_steps)

    def _longer(self, step: PlannedStep, shape: StepShape) -> float:
        """Plain steps by which drafts made the step longer; predicted, for clocks have hiccups."""
        plain_ms = self._pace.plain_ms(step.plain_ms)
        if plain_ms <= 0.0 or not step.asks:
            return 0.0
        further_ms = self.cost.predict(shape) - step.plain_ms + step.draft_ms + self._pace.ask_ms
        return min(further_ms / plain_ms, 2.0)

    def finish(self, request: Request) -> None:
        self.drafts.finish(request.request_id)
        if self._credits is not None:
            self._credits.finish(request)


class WideSteps:
    """Steps that are wider than seems to pay, where the cost of width is uncertain.

    A planner that believes wide steps to be expensive takes none, sees none, and would believe it
    for ever. So a draft that would pay if its width cost as little as is possible is verified as
    soon as exploring may cost that much.

    Args:
        is_strict: no request may be held up for others.
    """

    def __init__(self, cost: CostModel, exploration: Exploration, is_strict: bool) -> None:
        self._cost, self._exploration, self._is_strict = cost, exploration, is_strict
        self._hopes = False  # something was drafted for it
        self._running = 0, 0.0  # nodes of the step that is explored, and its predicted price

    def _may_be_wider(self, step: PlannedStep) -> bool:
        if not self._cost.learns or step.plain_ms <= 0.0:
            return False
        decoding = len(step.requests)
        return (
            step.shape.requests == decoding
            and (decoding == 1 or not self._is_strict)
            and self._exploration.covers("another choice", THOUGHT_MS)
        )

    def growth(self, step: PlannedStep, growth: Sequence[float]) -> Sequence[float]:
        """The times by which drafting is priced: hoped ones where the step may be wider."""
        if not self._may_be_wider(step):
            return growth
        if not self._exploration.covers("width", growth[-1] - growth[0]):
            return growth
        self._hopes = True
        return self._hoped(step, growth)

    def _hoped(self, step: PlannedStep, growth: Sequence[float]) -> list[float]:
        predicted = step.forwards[: len(growth)]
        times = zip(growth, predicted, self._cost.hoped(step.shape, predicted), strict=True)
        return [ms - (predicted_ms - hoped_ms) for ms, predicted_ms, hoped_ms in times]

    def widen(self, step: PlannedStep, drafts: Drafts, few: int, drafted: int, pick: Pick) -> None:
        """Choose more of what was drafted, where that is to be explored.

        Args:
            few: nodes that are chosen, of the ``drafted`` ones.
            pick: chooses at a given growth of the step, and returns the number of nodes.
        """
        if few == drafted:
            self._hopes = False
            return
        if not self._may_be_wider(step):
            return
        self._exploration.spend("another choice", THOUGHT_MS)
        drafted_ms = self._drafted_ms(step, drafts)
        growth = step.growth
        many = pick(self._hoped(step, growth))
        is_wider = few < many < len(growth) and growth[few] < growth[many]
        cost_ms = growth[many] - growth[few] if is_wider else 0.0
        begins = is_wider and self._exploration.covers("width", cost_ms)
        if drafted_ms:
            self._exploration.spend("width", drafted_ms)
        if begins:
            self._running = many, cost_ms
        elif many != few:  # as many nodes are the same ones
            pick(growth)

    def _drafted_ms(self, step: PlannedStep, drafts: Drafts) -> float:
        """Time of drafting that would not have been spent at the usual prices."""
        hopes, self._hopes = self._hopes, False
        if not hopes:
            return 0.0
        used = max([max(tree.depths()) for tree in drafts.chosen() if tree.token_ids], default=1)
        return max(0, step.levels - used) * step.level_ms

    def end(self, step: PlannedStep, report: StepReport) -> None:
        """A planned step is over; if it was explored, it costs at most what was predicted."""
        (nodes, price_ms), self._running = self._running, (0, 0.0)
        if nodes and nodes == report.shape.rows - step.shape.rows:
            longer_ms = report.forward_ms - step.plain_ms
            is_known = report.forward_ms > 0.0  # which NaN is not
            cost_ms = min(price_ms, max(0.0, longer_ms)) if is_known else price_ms
            self._exploration.spend("width", cost_ms)


Pick = Callable[[Sequence[float]], int]
MakePlanner = Callable[[CostModel, Objective], Planner]
new_drafts: Any = getattr(kernels, "Drafts", drafts.Drafts)
is_sound: Callable[[DraftTree, int], bool] = getattr(kernels, "is_sound", lambda tree, size: False)
"""Whether a tree over a vocabulary of this size is known to be valid, without a closer look."""
PLANNERS: dict[str, MakePlanner] = {
    "auto": lambda cost, objective: CostAwarePlanner(cost, objective, new_drafts()),
    "fixed": lambda cost, objective: FixedPlanner(new_drafts(calibrates=False)),
}
