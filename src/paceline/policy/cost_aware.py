"""The planner: for each step of the whole batch the draft that pays best on this machine.

It maximises, over all draft nodes of all requests at once,

    sum of path probabilities - rate * (T(step + nodes) - T(step))

with T from the cost model, path probabilities from the calibration, and the rate at which the
engine makes tokens as the price of time. Drafting is decided before it is paid, by accounts of what
asking each proposer brought. Owns the order of these parts; each is a module of its own. Knows no
forwards, and nothing that it decides can change a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf

from paceline.config.objective import Objective
from paceline.policy.acceptance import Calibration
from paceline.policy.asking import USUAL_HOST_MS, Asking
from paceline.policy.asks import asks_for_drafts
from paceline.policy.choice import choose_nodes
from paceline.policy.cost import CostModel
from paceline.policy.cost_points import StepShape
from paceline.policy.drafting_cost import DraftingCost
from paceline.policy.exploration import Exploration
from paceline.policy.fairness import ENOUGH, Fairness
from paceline.policy.lateness import Lateness
from paceline.policy.ledger import Ledger
from paceline.policy.pace import USUAL_EXTRA_MS, Pace
from paceline.policy.planned import UNPLANNED, PlannedStep
from paceline.policy.planner import DraftLimits, Drafts, PlainStep, Source, StepReport
from paceline.policy.prices import FREE, Prices, cheapest_ahead
from paceline.policy.selection import selected
from paceline.policy.wide_steps import Pick, WideSteps
from paceline.request import Request, VerifyResult
from paceline.span import DraftTree

SLOWDOWN = 0.03
"""Share of its plain speed that a request may lose to its neighbours' drafts in the long run."""
MAX_NODES = 64
NODES_PER_REQUEST = 8
"""Draft nodes of a step that are considered: the former, or the latter per request if more."""

PLAIN_DOUBT = 0.13
"""Standard deviation of the logarithm of a plain step's time beyond which one is to be seen."""
MOST_LONGER = 2.0
"""Plain steps that one step is taken to be longer at most."""

Choose = Callable[..., list[list[int]]]


class CostAwarePlanner:
    """See the module's docstring.

    Args:
        cost: shared with the engine, which teaches it.
        objective: what is to be made small.
        drafting: what drafting costs; None learns it from the clock. With fixed times and a cost
            model that does not learn, no decision depends on a clock and a replay decides the same.
        choose: the choice of nodes; the default is in Python.
        calibration: what estimates them; likewise.
    """

    def __init__(
        self,
        cost: CostModel,
        objective: Objective | None = None,
        drafting: DraftingCost | None = None,
        choose: Choose = choose_nodes,
        calibration: Calibration | None = None,
    ) -> None:
        self.cost = cost
        self.objective = objective or Objective()
        self.calibration = calibration or Calibration()
        self.drafting = drafting or DraftingCost()
        self._is_frozen, self._host = not cost.learns, cost.table.host
        self._choose = choose
        self._asking = Asking(self.drafting, self._host.ask or USUAL_HOST_MS)
        host = self._host
        extra_ms = (host.draft, host.further_draft) if host.draft else USUAL_EXTRA_MS
        pace = Pace(host.step, extra_ms)
        self._ledger = Ledger(self._asking, cost.learns, pace)
        is_strict = self.objective.kind == "latency"
        self._slowdown = 0.0 if is_strict else SLOWDOWN
        self._fairness = None if is_strict else Fairness(SLOWDOWN)
        tpot_ms = self.objective.tpot_ms
        self._lateness = None if tpot_ms is None else Lateness(tpot_ms)
        self._exploration = Exploration()
        self._wide = WideSteps(cost, self._exploration, self._lateness, is_strict)
        self._step, self._is_open = PlannedStep(), False

    @property
    def planned(self) -> PlannedStep:
        """The latest step, for whoever wants to show how it was planned."""
        return self._step

    def set_sources(self, sources: Sequence[Source]) -> None:
        self._ledger.settle()
        self._asking.set_sources(sources)

    # --- before drafting -----------------------------------------------------------------------

    def begin(self, step: StepShape, requests: Sequence[Request]) -> bool:
        if self._lateness is not None:
            self._lateness.begin(requests)
        self._is_open = True
        if self._ledger.is_resting(
            requests, lambda: self._rate(step, len(requests)), lambda: self._needy(requests)
        ):
            self._step = UNPLANNED
            return False
        planned = self._step = PlannedStep(step, requests, began=time.perf_counter())
        planned.plain_ms = self.cost.predict(step)
        planned.rate = self._rate(step, len(requests))
        if step.requests == len(requests) and self._explores_plain(planned):
            return False
        if self._fairness is not None and len(requests) > 1:
            planned.ahead = self._fairness.ahead(requests)
        return True

    def _explores_plain(self, step: PlannedStep) -> bool:
        """Whether a step is plain because it is in doubt what that takes.

        An engine that always speculates never sees what it is compared with.
        """
        if self.cost.deviation(step.shape) < PLAIN_DOUBT:
            return False
        return not any(map(asks_for_drafts, step.requests))

    def _needy(self, requests: Sequence[Request]) -> Sequence[tuple[Request, float]]:
        """Who cannot wait for the drafts of others, and for how many steps to come."""
        if self._fairness is None or len(requests) == 1:
            return ()
        return self._fairness.needy(requests)

    def rest_ms(self) -> float:
        needs_each = self._is_frozen or self._lateness is not None
        return 0.0 if needs_each else self._ledger.quiet_ms

    def rested(self, steps: Sequence[PlainStep]) -> None:
        milliseconds = sum([step.total_ms for step in steps])
        self._ledger.note_plain(steps, milliseconds)
        self._exploration.passed(milliseconds)
        if self._fairness is not None:
            self._fairness.passed_plainly(len(steps))

    def _rate(self, step: StepShape, decoding: int) -> float:
        """The value of time is that of decoding alone: a prefill chunk does not lower it."""
        if step.requests > decoding:
            seen = decoding * step.context_sum / step.requests
            step = StepShape(decoding, seen, seen, decoding, decoding)
        return self._ledger.pace.tokens_per_ms(decoding, self.cost.predict(step))

    def _growth(self, max_nodes: int) -> Sequence[float]:
        step = self._step
        count = min(max_nodes, max(MAX_NODES, NODES_PER_REQUEST * len(step.requests)))
        if len(step.growth) <= count:
            step.growth = self.cost.growth(step.shape, count)
            extra_ms = self._host.draft
            if not self._is_frozen:
                extra_ms = self._ledger.pace.extra_ms(len(step.requests))
            if extra_ms:
                plain_ms, *further = step.growth
                step.growth = [plain_ms, *[ms + extra_ms for ms in further]]
        return step.growth

    def ask(self, source: Source, candidates: Sequence[int], drafts: Drafts) -> list[int]:
        step = self._step
        needy = [i for i, ahead in enumerate(step.ahead) if ahead < ENOUGH] if step.ahead else ()
        asks = self._asking.ask(source, step.requests, candidates, drafts, step.rate, needy)
        step.asks += asks
        return [asked.index for asked in asks]

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        step = self._step
        if not source.costs_forwards:
            return FREE
        requests = [step.requests[i] for i in chosen]
        calibration, name = self.calibration, source.name

        def estimate(index: int, depth: int, prob: float) -> float:
            request = requests[index]
            if asks_for_drafts(request):
                return inf
            return calibration.estimate(request.request_id, name, depth, prob)

        growth = self._growth(max_nodes)[: max_nodes + 1]
        growth = self._wide.growth(step, growth)
        return Prices(
            nodes=[step.rate * ms for ms in cheapest_ahead(growth)],
            level=step.rate * self.drafting.of(name).level,
            estimate=estimate,
        )

    # --- after drafting ------------------------------------------------------------------------

    def drafted(
        self, source: Source, chosen: Sequence[int], trees: Sequence[DraftTree], milliseconds: float
    ) -> None:
        step, name = self._step, source.name
        levels, has_levels = 1, source.costs_forwards and source.costs_levels
        if has_levels:
            levels = max((max(tree.depths()) for tree in trees if len(tree)), default=1)
        asks = [asked for asked in step.asks if asked.key[0] == name]
        lag = sum([asked.lag for asked in asks])
        drafting = self.drafting
        if not drafting.is_fixed:
            drafting.observe(name, levels, lag, milliseconds, has_levels)
        if has_levels:
            step.levels, step.level_ms = levels, drafting.of(name).level
        usual_ms = drafting.milliseconds(name, levels)
        if drafting.is_fixed:
            milliseconds = usual_ms + drafting.catch_up(name, lag)
        step.draft_ms += milliseconds
        if source.costs_forwards:
            self._asking.drafted(asks, step.requests, milliseconds)
        for asked in asks:
            asked.cost_ms = usual_ms / asked.candidates
        for i, tree in zip(chosen, trees, strict=True):
            if tree.token_ids:
                self.calibration.calibrate(step.requests[i].request_id, tree)
                step.num_trees += 1
        step.ended = time.perf_counter()  # if nothing was drafted, there is no choice

    def choose(
        self, trees: Sequence[DraftTree], limits: Sequence[DraftLimits], node_budget: int
    ) -> list[DraftTree]:
        step = self._step
        if self._lateness is not None:
            step.weights = self._lateness.weights(step.requests)
        growth = self._growth(sum([len(tree.token_ids) for tree in trees]))
        pick = self._picker(trees, limits, node_budget)
        picked = pick(growth)
        for request, tree in zip(step.requests, trees, strict=True):
            if tree.token_ids:
                step.trees[request.request_id] = tree
        self._credit(picked)
        picked = self._wide.wider(step, picked, pick)
        step.ended = time.perf_counter()
        return picked

    def _picker(
        self, trees: Sequence[DraftTree], limits: Sequence[DraftLimits], node_budget: int
    ) -> Pick:
        """What says which parts of the trees to verify, were this the growth of the step."""
        step = self._step

        def pick(growth: Sequence[float]) -> list[DraftTree]:
            chosen = self._choose(
                trees,
                limits,
                growth,
                step.rate,
                weights=step.weights,
                slowdown=self._slowdown,
                ahead=step.ahead,
                node_budget=node_budget,
            )
            return [selected(tree, nodes) for tree, nodes in zip(trees, chosen, strict=True)]

        return pick

    def _credit(self, picked: Sequence[DraftTree]) -> None:
        """Note what each proposer's nodes promise beyond the time in which they are verified."""
        step = self._step
        total = sum([len(tree.token_ids) for tree in picked])
        if not total:
            return
        price = step.rate * (step.growth[min(total, len(step.growth) - 1)] - step.growth[0]) / total
        probs = [tree.path_probs() if tree.token_ids else () for tree in picked]
        for asked in step.asks:
            asked.credit(picked[asked.index], probs[asked.index], price)

    # --- after the step ------------------------------------------------------------------------

    def observe(self, request: Request, result: VerifyResult) -> None:
        tree = self._step.trees.get(request.request_id)
        if tree is not None:
            self.calibration.learn(request.request_id, tree, result.token_ids)
        if self._fairness is not None:
            self._fairness.emitted(request, len(result.token_ids))

    def end(self, report: StepReport) -> None:
        if not self._is_open:  # nobody decoded, so nothing was planned
            self._step = UNPLANNED
        step, self._is_open = self._step, False
        if step.ended:
            step.host_ms = self._planning_ms(step, report)
        if self._is_frozen:
            forward_ms = self.cost.predict(report.shape)
            total_ms = forward_ms + step.draft_ms + self._host_ms(report, step)
            report = StepReport(report.shape, forward_ms, total_ms, *report[3:])
        if self._lateness is not None:
            self._lateness.passed(report.total_ms)
        self._exploration.passed(report.total_ms)
        longer = 0.0
        if step is UNPLANNED:
            self._ledger.note(report)
        else:
            self._wide.end(step, report)
            self._ledger.book(report, step)
            longer = self._longer(step, report.shape)
        if self._fairness is not None:
            self._fairness.passed(1.0 + longer)

    def _planning_ms(self, step: PlannedStep, report: StepReport) -> float:
        if self._is_frozen:
            drafted = report.shape.rows > step.shape.rows
            return self._host.planning(drafted) if step.asks else 0.0
        return (step.ended - step.began) * 1e3 - step.draft_ms

    def _host_ms(self, report: StepReport, step: PlannedStep) -> float:
        """What the table says of the host's time in a step."""
        shape = report.shape
        nodes = shape.rows - step.shape.rows if step.trees else 0
        drafts = min(nodes, len(step.trees))
        merges = step.num_trees - len(step.trees)
        return self._host.of(shape.requests, drafts, nodes, bool(step.asks), merges)

    def _longer(self, step: PlannedStep, shape: StepShape) -> float:
        """Plain steps by which drafts made the step longer; predicted, for clocks have hiccups."""
        plain_ms = self._ledger.pace.plain_ms(step.plain_ms)
        if plain_ms <= 0.0:
            return 0.0
        forward_ms = self.cost.predict(shape) - step.plain_ms
        return min((forward_ms + step.draft_ms + step.host_ms) / plain_ms, MOST_LONGER)

    def finish(self, request: Request) -> None:
        self.calibration.finish(request.request_id)
        self._asking.finish(request)
        if self._fairness is not None:
            self._fairness.finish(request)
        if self._lateness is not None:
            self._lateness.finish(request)
