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

from paceline.config.objective import Objective
from paceline.policy.choice import DraftLimits
from paceline.policy.cost import CostModel
from paceline.policy.cost_points import StepShape
from paceline.policy.credit import ENOUGH, Credits
from paceline.policy.drafting_cost import USUAL_LAG, DraftingCost
from paceline.policy.drafts import Drafts
from paceline.policy.exploration import Exploration
from paceline.policy.pace import Pace
from paceline.policy.planned import (
    UNPLANNED,
    Asked,
    Candidate,
    Lesson,
    PlannedStep,
    asks_for_drafts,
)
from paceline.policy.planner import Source, StepReport
from paceline.policy.prices import FREE, Prices, cheapest_ahead
from paceline.policy.proposer_value import ProposerValues
from paceline.policy.wide_steps import WideSteps
from paceline.request import Request, VerifyResult
from paceline.span import DraftTree

SLOWDOWN = 0.03
"""Share of its plain speed that a request may lose to its neighbours' drafts in the long run."""
MAX_NODES = 64
NODES_PER_REQUEST = 8
"""So many draft nodes of a step are considered: :data:`MAX_NODES`, or more in large batches."""
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
        self._sources: list[Source] = []
        self._drafting, self._values = DraftingCost(), ProposerValues()
        self._pace, self._exploration = Pace(cost.table.host), Exploration()
        is_strict = self.objective.kind == "latency"
        self._credits = None if is_strict else Credits()
        self._wide = WideSteps(cost, self._exploration, is_strict)
        self._step = self.planned = UNPLANNED
        """The step that is open, and the latest, for whatever shows how it was planned."""

    @property
    def num_requests(self) -> int:
        """Requests of which something is kept."""
        return 0 if self._credits is None else len(self._credits)

    def set_sources(self, sources: Sequence[Source]) -> None:
        if not all(source in sources for source in self._sources):
            self._values = ProposerValues()  # what one brought says nothing of another
        self._sources = list(sources)

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
            pause_ms = self._pause_ms(requests, rate)
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

    def _pause_ms(self, requests: Sequence[Request], rate: float) -> float:
        """Time that has to pass before any proposer is worth asking first, or may be explored."""
        willing = [i for i, each in enumerate(requests) if each.params.speculative.enabled]
        least_ms = inf if self._sources else 0.0  # a planner that was told of none asks all
        for source in self._sources:
            name, able = source.name, [i for i in willing if source.applies(requests[i])]
            if not able:
                continue
            is_hopeful = self._values.of(name).gain(rate) > 0.0
            cost_ms = self._ask_ms(name)
            pause_ms = self._exploration.milliseconds_until(name, cost_ms)
            if is_hopeful or pause_ms <= 0.0:
                found = self._candidates(source, able)
                if is_hopeful and (not found or any(self._is_worth(name, each) for each in found)):
                    return 0.0  # where none is found, one may be from the next token on
                if found:
                    cost_ms += min(self._drafting.catch_up(name, each.lag) for each in found)
                    pause_ms = self._exploration.milliseconds_until(name, cost_ms)
            least_ms = min(least_ms, pause_ms)
        return least_ms

    def _candidates(self, source: Source, places: Sequence[int]) -> list[Candidate]:
        """Those of some requests for which a source could draft."""
        expected = self.drafts.expected if self._step.asks else lambda index: 0.0
        found = []
        for i in places:
            lag = source.lag(self._step.requests[i])
            if lag is not None:
                value = self._values.of(source.name, expected(i))
                found.append(Candidate(i, value, lag if lag > USUAL_LAG else 0))
        return found

    def _ask_ms(self, name: str) -> float:
        return self._drafting.milliseconds(name) + self._pace.ask_ms

    def _rate(self, step: StepShape, decoding: int, plain_ms: float) -> float:
        """The value of time is that of decoding alone: a prefill chunk does not lower it."""
        if step.requests > decoding:
            seen = decoding * step.context_sum / step.requests
            plain_ms = self.cost.predict(StepShape(decoding, seen, seen, decoding, decoding))
        return self._pace.tokens_per_ms(decoding, plain_ms)

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        step, worth, doubtful = self._step, list[Candidate](), list[Candidate]()
        for each in self._candidates(source, candidates):
            (worth if self._is_worth(source.name, each) else doubtful).append(each)
        if not worth and not doubtful and self._values.of(source.name).gain(step.rate) <= 0.0:
            # Looking in vain is exploring too.
            self._exploration.spend(source.name, self._pace.ask_ms)
        if step.ahead and source.costs_forwards and self._holds_up(worth):
            worth = [each for each in worth if asks_for_drafts(step.requests[each.place])]
        elif doubtful:
            worth += self._explored(source.name, doubtful)
            worth.sort()
        if worth:
            lag = sum([each.lag for each in worth])
            lessons = self._lessons(worth)
            step.asks.append(Asked(source.name, len(worth), lag, len(candidates), lessons))
        return [each.place for each in worth]

    def _lessons(self, candidates: Sequence[Candidate]) -> Sequence[Lesson]:
        lessons: dict[int, Lesson] = {}
        for index, value, lag in candidates:
            if not lag and not asks_for_drafts(self._step.requests[index]):
                lesson = lessons.get(id(value))
                if lesson is None:
                    lesson = lessons[id(value)] = Lesson(value)
                lesson.indices.append(index)
        return [*lessons.values()]

    def _is_worth(self, name: str, candidate: Candidate) -> bool:
        request, rate = self._step.requests[candidate.place], self._step.rate
        gain = candidate.value.gain(rate)
        if (gain > 0.0 and not candidate.lag) or asks_for_drafts(request):
            return True
        if gain <= 0.0:
            return False
        # Catching up is an investment: it has to come back before the request ends, in the usual
        # situation, in which no other proposer drafts.
        gain = min(gain, self._values.of(name).gain(rate))
        steps = request.remaining / (1 + gain)
        return gain * steps > rate * self._drafting.catch_up(name, candidate.lag)

    def _holds_up(self, candidates: Sequence[Candidate]) -> bool:
        """Whether drafts for these hold up a request that cannot wait for them."""
        indices = {each.place for each in candidates}
        ahead = self._step.ahead or ()
        return any(has < ENOUGH and i not in indices for i, has in enumerate(ahead))

    def _explored(self, name: str, doubtful: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those of these that are asked to see whether it pays by now: who is not behind first."""
        ready = [each for each in doubtful if not each.lag]
        chosen = ready or [min(doubtful, key=lambda each: each.lag)]
        cost_ms = self._ask_ms(name) + self._drafting.catch_up(name, chosen[0].lag)
        if not self._exploration.covers(name, cost_ms):
            return ()
        self._step.explored.add(name)
        return chosen

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
            level=step.rate * self._drafting.of(name).level,
            estimate=estimate,
        )

    def _growth(self, max_nodes: int) -> Sequence[float]:
        step = self._step
        count = min(max_nodes, max(MAX_NODES, NODES_PER_REQUEST * len(step.requests)))
        if len(step.growth) <= count:
            plain_ms, *further = step.forwards = self.cost.growth(step.shape, count)
            extra_ms = self._pace.draft_ms(len(step.requests))
            step.growth = [plain_ms, *[ms + extra_ms for ms in further]]
        return step.growth

    # --- after drafting ------------------------------------------------------------------------

    def drafted(self, source: Source, chosen: Sequence[int], milliseconds: float) -> None:
        step, name, drafting = self._step, source.name, self._drafting
        levels, has_levels = 1, source.costs_forwards and source.costs_levels
        if has_levels:
            levels = self.drafts.depth(name)
        asked = step.asks[-1]
        drafting.observe(name, levels, asked.lag, milliseconds, has_levels)
        if has_levels:
            step.levels, step.level_ms = levels, drafting.of(name).level
        step.draft_ms += milliseconds
        if name in step.explored:
            self._exploration.spend(name, milliseconds + self._pace.ask_ms)
        asked.cost_ms = drafting.milliseconds(name, levels) / asked.able

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        step, drafts = self._step, self.drafts
        drafted = sum(drafts.sizes())

        def pick(growth: Sequence[float]) -> int:
            return drafts.choose(
                limits,
                growth,
                step.rate,
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
                    lesson.gain = drafts.gain(asked.name, lesson.indices, price)
        self._wide.widen(step, drafts, count, drafted, pick)
        return drafts.chosen()

    # --- after the step ------------------------------------------------------------------------

    def observe(self, request: Request, result: VerifyResult) -> None:
        if self._step is not UNPLANNED:
            self.drafts.learn(request.request_id, result.token_ids)
        if self._credits is not None:
            self._credits.emitted(request, len(result.token_ids))

    def end(self, report: StepReport) -> None:
        step, self._step = self._step, UNPLANNED
        self.planned = step
        self._exploration.passed(report.total_ms)
        plain_ms = report.forward_ms / report.num_steps
        if step is not UNPLANNED:
            self._wide.end(step, report)
            plain_ms = step.plain_ms if report.shape.rows > step.shape.rows else plain_ms
        if report.shape.requests == report.num_decoding and report.total_ms > 0.0:
            self._pace.observe(report, plain_ms, step.draft_ms, bool(step.asks))
        shared_ms = self._pace.ask_ms / (sum([asked.count for asked in step.asks]) or 1)
        for asked in step.asks:
            for lesson in asked.lessons:
                lesson.learn(asked.cost_ms + shared_ms)
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
