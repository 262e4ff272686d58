"""Looks at wide steps that seem too dear, so that their price stays known. Owns which they are.

A planner that takes wide steps to be dear takes none, sees none, and would believe it for ever: of
a table that was measured while another process held a core, or with kernels that were since
replaced. So a draft that would pay were width much cheaper is verified now and then. It is the
counterpart of :class:`~paceline.policy.pace.PlainCheck`. Looks are paid from a share of the time,
each at the milliseconds by which it was longer than what would have been chosen, as predicted at
most. Nothing is spent on drafts that would not pay even then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.policy.allowance import Allowance
from paceline.policy.cost import CostModel
from paceline.policy.lateness import Lateness
from paceline.policy.planned import PlannedStep
from paceline.policy.planner import StepReport
from paceline.span import DraftTree

HOPE = 0.125
"""What width is hoped to cost, as a part of what it is believed to."""
SHARE = 0.004
"""Share of the time that looks may take."""
PAUSE = 16
"""Plain steps from one thought of a look to the next: it takes as long as another choice."""
LONGEST_PAUSE = 10_000
"""Plain steps between two thoughts whose time counts at most, against clocks that jump."""

Pick = Callable[[Sequence[float]], list[DraftTree]]


class WidthCheck:
    """See the module's docstring.

    Args:
        cost: predicts forwards.
        lateness: of requests that are to have a token in time; None where none are.
        is_strict: no request may be held up for others.
    """

    def __init__(self, cost: CostModel, lateness: Lateness | None, is_strict: bool) -> None:
        self._cost, self._lateness, self._is_strict = cost, lateness, is_strict
        self._allowance = Allowance(SHARE)
        self._passed_ms = self._pause_ms = 0.0  # since the latest thought, and how long that lasts
        self._hopes = False  # something was drafted for a look
        self._look = 0, 0.0  # nodes of the one that is running, and its predicted price

    def passed(self, milliseconds: float) -> None:
        """Let time pass."""
        self._passed_ms += milliseconds

    def may_look(self, step: PlannedStep) -> bool:
        """Whether the step may become one that is wider than seems to pay."""
        if self._passed_ms < self._pause_ms or step.plain_ms <= 0.0:
            return False
        decoding = len(step.requests)
        return step.shape.requests == decoding and (decoding == 1 or not self._is_strict)

    def growth(self, step: PlannedStep, growth: Sequence[float]) -> Sequence[float]:
        """By what further drafting is priced: hoped times where there may be a look.

        Args:
            growth: milliseconds of the step with 0, 1, 2, ... draft nodes, all that they take.
        """
        if not self.may_look(step) or not self._allowance.covers(growth[-1] - growth[0]):
            return growth
        self._hopes = True
        return hoped(growth, self._cost.growth(step.shape, len(growth) - 1))

    def wider(self, step: PlannedStep, picked: list[DraftTree], pick: Pick) -> list[DraftTree]:
        """What to verify: what is picked, or more where that is to be looked at.

        Args:
            pick: what would be picked at such a growth.
        """
        if not self.may_look(step):
            return picked
        growth = step.growth
        forward = self._cost.growth(step.shape, len(growth) - 1)
        more = pick(hoped(growth, forward))
        self._pause(step.plain_ms)
        few, many = _count(picked), _count(more)
        is_wider = few < many < len(growth) and growth[few] < growth[many]
        cost_ms = growth[many] - growth[few] if is_wider else 0.0
        begins = (
            is_wider
            and self._allowance.covers(cost_ms)
            and (self._lateness is None or self._lateness.allows(step.requests, forward[many]))
        )
        self._allowance.spend(self._drafted_ms(step, picked))
        if not begins:
            return picked
        self._look = many, cost_ms
        return more

    def _pause(self, plain_ms: float) -> None:
        """Think of no look for some plain steps."""
        if self._passed_ms > 0.0:  # which NaN is not
            self._allowance.passed(min(self._passed_ms, LONGEST_PAUSE * plain_ms))
        self._passed_ms, self._pause_ms = 0.0, PAUSE * plain_ms

    def _drafted_ms(self, step: PlannedStep, picked: Sequence[DraftTree]) -> float:
        """Time of drafting that would not have been without a look."""
        hopes, self._hopes = self._hopes, False
        used = max([max(tree.depths()) for tree in picked if tree.token_ids], default=1)
        return max(0, step.levels - used) * step.level_ms if hopes else 0.0

    def end(self, step: PlannedStep, report: StepReport) -> None:
        """A planned step is over; so is the look, if it was one."""
        (nodes, price_ms), self._look = self._look, (0, 0.0)
        if nodes and nodes == report.shape.rows - step.shape.rows:
            longer_ms = report.forward_ms - step.plain_ms
            is_known = report.forward_ms > 0.0  # which NaN is not
            self._allowance.spend(min(price_ms, max(0.0, longer_ms)) if is_known else price_ms)


def hoped(growth: Sequence[float], forward: Sequence[float]) -> list[float]:
    """What steps would take were width as cheap as one may hope.

    Args:
        growth: milliseconds of the step with 0, 1, 2, ... draft nodes, all that they take.
        forward: of its forward alone.
    """
    plain_ms, less = forward[0], 1.0 - HOPE
    pairs = zip(growth, forward, strict=True)
    return [ms - less * max(0.0, part - plain_ms) for ms, part in pairs]


def _count(trees: Sequence[DraftTree]) -> int:
    return sum([len(tree.token_ids) for tree in trees])
