"""The planner: for each step of the whole batch the draft that pays best on this machine.

It maximises, over all draft nodes of all requests at once,

    sum of path probabilities - rate * (T(step + nodes) - T(step))

with T from the cost model, path probabilities from the calibration, and the rate at which the
engine makes tokens as the price of time. Whether a proposer is asked is the same rule with what
asking it is expected to bring. What seems not to pay is tried as often as exploring it may cost.

Owns the order of these parts; each is a module of its own. Knows no forwards and no clock, and
nothing that it decides can change a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from paceline.config import Objective
from paceline.planner.asking import Asking
from paceline.planner.choice import DraftLimits
from paceline.planner.cost import CostModel
from paceline.planner.cost_points import StepShape
from paceline.planner.credit import Credits
from paceline.planner.drafts import Drafts
from paceline.planner.pace import Pace
from paceline.planner.planned import UNPLANNED, PlannedStep, asks_for_drafts
from paceline.planner.planner import Source, StepReport
from paceline.planner.prices import FREE, Prices, cheapest_ahead
from paceline.planner.promise import Promise
from paceline.planner.wide_steps import WideSteps
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree

SLOWDOWN = 0.03
"""Share of its plain speed that a request may lose to its neighbours' drafts in the long run."""
MAX_NODES = 64
NODES_PER_REQUEST = 8
"""So many draft nodes of a step are considered: :data:`MAX_NODES`, or more in large batches."""
MOST_NODES, NEARLY_FREE = 256, 1.5
"""Or that many where :data:`MAX_NODES` make a step no more than so many times as long, which is so
where weights are read from disk meanwhile."""
PLAIN_DOUBT = 0.13
"""Standard deviation of the logarithm of a plain step's time beyond which one is to be seen."""
MOST_LONGER = 2.0
"""By how many plain steps a step is taken to be longer at most: clocks have hiccups."""
MAX_SKIPPED = 64
"""Steps for which the planner need not be asked at most."""


class CostAwarePlanner:
    """See the module's docstring.

    Args:
        cost: shared with the engine, which teaches it.
        objective: what is to be made small.
        drafts: None is those in Python.
    """

    asks_together = True

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
        """The step that is open, and the latest, for whatever shows how it was planned."""

    @property
    def num_requests(self) -> int:
        """Requests of which something is kept."""
        return 0 if self._credits is None else len(self._credits)

    def set_sources(self, sources: Sequence[Source]) -> None:
        self._asking.set_sources(sources)

    # --- before drafting -----------------------------------------------------------------------

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        self.planned = UNPLANNED
        plain_ms = self.cost.predict(step)
        rate = self._rate(step, len(requests), plain_ms)
        self._step = PlannedStep(step, requests, plain_ms=plain_ms, rate=rate)
        if not any(map(asks_for_drafts, requests)):
            if step.requests == len(requests) and self.cost.deviation(step) > PLAIN_DOUBT:
                # An engine that always speculates never sees what it is compared with.
                return self._pass(1)
            pause_ms = self._asking.pause_ms(self._step)
            if pause_ms > 0.0:
                longest_ms = MAX_SKIPPED * self._pace.plain_ms(plain_ms)
                return self._pass(max(1, int(MAX_SKIPPED * min(1.0, pause_ms / longest_ms))))
        self.planned = self._step
        self._step.slowdown = self._slowdown(plain_ms)
        if len(requests) > 1:
            credits, none = self._credits, [0.0] * len(requests)
            self._step.ahead = none if credits is None else credits.ahead(requests)
        return 0

    def _pass(self, steps: int) -> int:
        """Ask none of the proposers for so many steps."""
        self._step = UNPLANNED
        return steps

    def _slowdown(self, plain_ms: float) -> float:
        """Share of its plain speed that a request may lose to the drafts of others."""
        tpot_ms = self.objective.tpot_ms
        if tpot_ms is not None:
            return max(0.0, 1.0 - self._pace.plain_ms(plain_ms) / tpot_ms)
        return SLOWDOWN if self._credits is not None else 0.0

    def wakes(self, requests: Sequence[Request]) -> bool:
        return self._asking.wakes(requests)

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
        if not source.costs_forwards:
            return FREE
        requests = [step.requests[i] for i in chosen]
        drafts, name = self.drafts, source.name

        def estimate(index: int, depth: int, prob: float) -> float:
            request = requests[index]
            if asks_for_drafts(request):
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
        step = self._step
        levels = self.drafts.depth(source.name) if source.has_levels else 1
        self._asking.drafted(step, source, levels, milliseconds)
        if source.has_levels:
            step.levels, step.level_ms = levels, self._asking.times.of(source.name).level
        step.draft_ms += milliseconds

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        step, drafts = self._step, self.drafts
        drafted = sum(drafts.sizes())

        kept = self._promise.kept

        def pick(growth: Sequence[float]) -> int:
            return drafts.choose(
                limits,
                growth,
                step.rate / kept,
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
                    gain = drafts.gain(asked.name, lesson.indices, price / kept)
                    lesson.gain = kept * gain
        self._wide.widen(step, drafts, count, drafted, pick)
        return drafts.chosen()

    # --- after the step ------------------------------------------------------------------------

    def observe(self, request: Request, result: VerifyResult) -> None:
        if self._step is not UNPLANNED:
            self.drafts.learn(request.request_id, result.token_ids)
            if len(result.draft) and not asks_for_drafts(request):
                self._promise.observe(sum(result.draft.path_probs()), result.num_accepted)
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
        return min(further_ms / plain_ms, MOST_LONGER)

    def finish(self, request: Request) -> None:
        self.drafts.finish(request.request_id)
        if self._credits is not None:
            self._credits.finish(request)
