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

from paceline.objective import Objective
from paceline.policy.acceptance import Calibration, as_if_verified
from paceline.policy.asking import Asking, asks_for_drafts
from paceline.policy.choice import choose_nodes
from paceline.policy.cost import CostModel
from paceline.policy.cost_points import StepShape
from paceline.policy.drafting_cost import DraftingCost
from paceline.policy.pace import Pace, PlainCheck
from paceline.policy.padding import Padding
from paceline.policy.planned import UNPLANNED, PlannedStep
from paceline.policy.planner import (
    DraftLimits,
    Drafts,
    Source,
    StepReport,
    selected,
)
from paceline.policy.prices import FREE, Prices, cheapest_ahead
from paceline.request import Request, VerifyResult
from paceline.span import DraftTree

SLOWDOWN = 0.04
"""Share of its plain speed that a request may lose to its neighbours' drafts."""
MAX_NODES = 64
NODES_PER_REQUEST = 8
"""Draft nodes of a step that are considered: the former, or the latter per request if more."""
BEHIND_WEIGHT = 4.0
"""What a token of a request that is behind its target counts."""
MAX_NOTED = 64
"""Steps without drafts that are learnt from together."""

Choose = Callable[..., list[list[int]]]


class CostAwarePlanner:
    """See the module's docstring.

    Args:
        cost: shared with the engine, which teaches it.
        objective: what is to be made small.
        drafting: what drafting costs; None learns it from the clock. With fixed times and a cost
            model that does not learn, no decision depends on a clock and a replay decides the same.
        choose: the choice of nodes; the default is in Python.
    """

    def __init__(
        self,
        cost: CostModel,
        objective: Objective | None = None,
        drafting: DraftingCost | None = None,
        choose: Choose = choose_nodes,
    ) -> None:
        self.cost = cost
        self.objective = objective or Objective()
        self.calibration = Calibration()
        self.drafting = drafting or DraftingCost()
        self.pace = Pace()
        self._plain_check = PlainCheck()
        self._padding = Padding(cost)
        self._is_frozen = not cost.learns
        self._choose = choose
        self._asking = Asking(self.drafting)
        self._step, self._is_open = PlannedStep(), False
        self._noted: list[StepReport] = []
        self._resting: list[int] | None = None  # whom nobody is worth asking for,
        self._rest_ms = 0.0  # for so long
        self._elapsed_ms = 0.0
        self._starts: dict[int, tuple[float, int]] = {}

    @property
    def planned(self) -> PlannedStep:
        """The latest step, for whoever wants to show how it was planned."""
        return self._step

    def set_sources(self, sources: Sequence[Source]) -> None:
        self._learn_noted()
        self._asking.set_sources(sources)

    # --- before drafting -----------------------------------------------------------------------

    def begin(self, step: StepShape, requests: Sequence[Request]) -> bool:
        if self.objective.tpot_ms is not None:
            for request in requests:
                start = (self._elapsed_ms, len(request.token_ids))
                self._starts.setdefault(request.request_id, start)
        self._is_open = True
        is_forced, willing = False, []
        for request in requests:
            wish = request.params.speculative
            if wish.enabled:
                willing.append(request.request_id)
                is_forced = is_forced or bool(wish.num_speculative_tokens)
        if is_forced:
            self._learn_noted()
        elif self._is_to_rest(willing):
            self._step = UNPLANNED
            return False
        self._step = PlannedStep(step, requests, began=time.perf_counter())
        self._step.plain_ms = self._plain_ms(step)
        is_mixed = step.requests > len(requests)
        if self._plain_check.is_due and not is_forced and not is_mixed:
            return False
        self._step.rate = self._rate(step, len(requests))
        return True

    def _is_to_rest(self, willing: list[int]) -> bool:
        """Whether nobody is worth asking. Until time or other requests change that, it stays so."""
        if willing == self._resting and self._rest_ms > 0.0:
            return True
        self._learn_noted()
        if self._asking.is_anyone_worth_asking(willing):
            return False
        self._resting, self._rest_ms = willing, self._asking.rest_ms(willing)
        return True

    def _rate(self, step: StepShape, decoding: int) -> float:
        """The value of time is that of decoding alone: a prefill chunk does not lower it."""
        plain_ms = self._step.plain_ms
        if step.requests > decoding:
            seen = decoding * step.context_sum / step.requests
            plain_ms = self._plain_ms(StepShape(decoding, seen, seen, decoding, decoding))
        return self.pace.tokens_per_ms(decoding, plain_ms)

    def _plain_ms(self, step: StepShape) -> float:
        """Of a step without drafts."""
        return self.cost.predict(self._padding.padded(step))

    def _growth(self, max_nodes: int) -> Sequence[float]:
        step = self._step
        count = min(max_nodes, max(MAX_NODES, NODES_PER_REQUEST * len(step.requests)))
        if len(step.growth) <= count:
            step.growth = self._padding.growth(step.shape, count)
        return step.growth

    def ask(self, source: Source, candidates: Sequence[int], drafts: Drafts) -> list[int]:
        step = self._step
        asks = self._asking.ask(source, step.requests, candidates, drafts, step.rate)
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
        levels = 1
        if source.costs_forwards:
            levels = max((max(tree.depths()) for tree in trees if len(tree)), default=1)
        asks = [asked for asked in step.asks if asked.key[0] == name]
        lag = sum([asked.lag for asked in asks])
        self.drafting.observe(name, levels, lag, milliseconds, source.costs_forwards)
        usual_ms = self.drafting.milliseconds(name, levels)
        if self.drafting.is_fixed:
            milliseconds = usual_ms + self.drafting.catch_up(name, lag)
        step.draft_ms += milliseconds
        for asked in asks:
            asked.cost_ms = usual_ms / asked.candidates
        for i, tree in zip(chosen, trees, strict=True):
            if tree.token_ids:
                self.calibration.calibrate(step.requests[i].request_id, tree)

    def choose(
        self, trees: Sequence[DraftTree], limits: Sequence[DraftLimits], node_budget: int
    ) -> list[DraftTree]:
        step = self._step
        step.weights = self._weights()
        chosen = self._choose(
            trees,
            limits,
            self._growth(sum(map(len, trees))),
            step.rate,
            weights=step.weights,
            slowdown=0.0 if self.objective.kind == "latency" else SLOWDOWN,
            node_budget=node_budget,
        )
        step.trees = {
            request.request_id: tree
            for request, tree in zip(step.requests, trees, strict=True)
            if tree.token_ids
        }
        picked = [selected(tree, nodes) for tree, nodes in zip(trees, chosen, strict=True)]
        self._credit(picked)
        if not self._is_frozen:
            step.host_ms = (time.perf_counter() - step.began) * 1e3 - step.draft_ms
        return picked

    def padding(self, step: StepShape, room: int) -> int:
        count = self._padding.rows(step) if self._padding.is_known else 0
        return count if count <= room else 0

    def _weights(self) -> list[float] | None:
        """With a target per token, requests that are behind it come first."""
        target = self.objective.tpot_ms
        if target is None:
            return None
        weights = []
        for request in self._step.requests:
            began, tokens = self._starts[request.request_id]
            emitted = len(request.token_ids) - tokens
            behind = self._elapsed_ms - began > target * emitted
            weights.append(BEHIND_WEIGHT if behind else 1.0)
        return weights if min(weights) < max(weights) else None

    def _credit(self, picked: Sequence[DraftTree]) -> None:
        """Note what each proposer's nodes promise beyond the time in which they are verified."""
        step = self._step
        total = sum(map(len, picked))
        if not total:
            return
        price = step.rate * (step.growth[min(total, len(step.growth) - 1)] - step.growth[0]) / total
        for asked in step.asks:
            name, tree = asked.key[0], picked[asked.index]
            pairs = zip(tree.path_probs(), tree.origins, strict=True)
            asked.gain = sum([prob - price for prob, origin in pairs if origin == name])

    # --- after the step ------------------------------------------------------------------------

    def observe(self, request: Request, result: VerifyResult) -> None:
        tree = self._step.trees.get(request.request_id)
        if tree is not None:
            self.calibration.observe(request.request_id, as_if_verified(tree, result))

    def end(self, report: StepReport) -> None:
        if not self._is_open:  # nobody decoded, so nothing was planned
            self._step = UNPLANNED
        step, self._is_open = self._step, False
        if self._is_frozen:
            forward_ms = self.cost.predict(report.shape)
            report = report._replace(forward_ms=forward_ms, total_ms=forward_ms + step.draft_ms)
        self._elapsed_ms += report.total_ms
        if step is not UNPLANNED:
            self._learn(report, step)
            return
        self._noted.append(report)
        self._rest_ms -= report.total_ms
        if len(self._noted) == MAX_NOTED:
            self._learn_noted()

    def _learn_noted(self) -> None:
        noted, self._noted, self._resting = self._noted, [], None
        for report in noted:
            self._learn(report, UNPLANNED)

    def _learn(self, report: StepReport, step: PlannedStep) -> None:
        shape, forward_ms, total_ms, decoding, emitted, padding = report
        if not self._is_frozen:
            self.pace.observe_overhead(total_ms - forward_ms - step.draft_ms - step.host_ms)
        self._asking.settle(step.asks, step.rate, step.host_ms, total_ms)
        is_mixed = shape.requests > decoding
        if not decoding or is_mixed or total_ms <= 0.0:
            return
        drafted = shape.rows - padding > decoding
        plain_ms = step.plain_ms if drafted else forward_ms
        if drafted and not self._is_frozen:
            self._plain_check.observe_draft()
        elif not drafted and step.plain_ms:
            self._plain_check.observe_plain(step.plain_ms, forward_ms)
        self.pace.observe(emitted / decoding, total_ms, plain_ms)

    def finish(self, request: Request) -> None:
        self.calibration.finish(request.request_id)
        self._asking.finish(request)
        self._starts.pop(request.request_id, None)
