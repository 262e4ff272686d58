"""Steps that are wider than seems to pay, where the cost of width is in doubt. Owns which.

A planner that takes wide steps to be dear takes none, sees none, and would believe it for ever: of
a table that was measured while another process held a core, or with kernels that were since
replaced. So a draft that would pay at what its width may cost at best is verified as soon as
exploring may cost so much. Nothing is spent on drafts that would not pay even then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.planner.cost import CostModel
from paceline.planner.drafts import Drafts
from paceline.planner.exploration import Exploration
from paceline.planner.planned import PlannedStep
from paceline.planner.planner import StepReport

THOUGHT_MS = 0.1
"""Time of a second choice, about."""
THOUGHT, WIDTH = "another choice", "width"

Pick = Callable[[Sequence[float]], int]


class WideSteps:
    """See the module's docstring.

    Args:
        cost: predicts forwards.
        exploration: pays.
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
            and self._exploration.covers(THOUGHT, THOUGHT_MS)
        )

    def growth(self, step: PlannedStep, growth: Sequence[float]) -> Sequence[float]:
        """By what further drafting is priced: hoped times where the step may be wider.

        Args:
            growth: milliseconds of the step with 0, 1, 2, ... draft nodes, all that they take.
        """
        if not self._may_be_wider(step):
            return growth
        if not self._exploration.covers(WIDTH, growth[-1] - growth[0]):
            return growth
        self._hopes = True
        return self._hoped(step, growth)

    def _hoped(self, step: PlannedStep, growth: Sequence[float]) -> list[float]:
        predicted = step.forwards[: len(growth)]
        saved = zip(predicted, self._cost.hoped(step.shape, predicted), strict=True)
        return [ms - (dear - cheap) for ms, (dear, cheap) in zip(growth, saved, strict=True)]

    def widen(self, step: PlannedStep, drafts: Drafts, few: int, drafted: int, pick: Pick) -> None:
        """Choose more of what was drafted, where that is to be explored.

        Args:
            few: nodes that are chosen, of all that were drafted.
            pick: chooses at such a growth of the step, and says how many nodes.
        """
        if few == drafted:
            self._hopes = False
        if few == drafted or not self._may_be_wider(step):
            return
        self._exploration.spend(THOUGHT, THOUGHT_MS)
        drafted_ms = self._drafted_ms(step, drafts)
        growth = step.growth
        many = pick(self._hoped(step, growth))
        is_wider = few < many < len(growth) and growth[few] < growth[many]
        cost_ms = growth[many] - growth[few] if is_wider else 0.0
        begins = is_wider and self._exploration.covers(WIDTH, cost_ms)
        if drafted_ms:
            self._exploration.spend(WIDTH, drafted_ms)
        if begins:
            self._running = many, cost_ms
        else:
            pick(growth)

    def _drafted_ms(self, step: PlannedStep, drafts: Drafts) -> float:
        """Time of drafting that would not have been at the usual prices."""
        hopes, self._hopes = self._hopes, False
        if not hopes:
            return 0.0
        used = max([max(tree.depths()) for tree in drafts.chosen() if tree.token_ids], default=1)
        return max(0, step.levels - used) * step.level_ms

    def end(self, step: PlannedStep, report: StepReport) -> None:
        """A planned step is over; if it was explored, it is paid for, as predicted at most."""
        (nodes, price_ms), self._running = self._running, (0, 0.0)
        if nodes and nodes == report.shape.rows - step.shape.rows:
            longer_ms = report.forward_ms - step.plain_ms
            is_known = report.forward_ms > 0.0  # which NaN is not
            cost_ms = min(price_ms, max(0.0, longer_ms)) if is_known else price_ms
            self._exploration.spend(WIDTH, cost_ms)
