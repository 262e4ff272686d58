"""Rows that a step is given beyond its own, where a wider step is cheaper. Owns that rule.

Kernels have cliffs, downward ones too: on some machines four rows take less time than three. What
the further rows hold does not matter, for nobody reads what comes out of them. A step is only
widened from one measured width to another at which the table says so clearly, noise counted; what
was learnt since may deny it, but not claim it. Knows no requests and no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.policy.cost import CostModel
from paceline.policy.cost_points import CostPoint, StepShape
from paceline.policy.cost_table import CostTable

REACH = 8
"""Most rows that a step is given."""
LEAST_GAIN = 0.03
"""Part of its time that a step must save for sure."""


class Padding:
    """See the module's docstring.

    Args:
        cost: what steps cost; its table is read once.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._dips = dips(cost.table)
        self.is_known = bool(self._dips)
        """Whether any step is cheaper for being wider."""

    def rows(self, step: StepShape) -> int:
        """Rows to add to a step; 0 where none are to be."""
        count = self._dips.get(step.rows, 0)
        if not count or step.samples < step.rows:  # of mixed steps the dips were not measured
            return 0
        return count if self._cost.predict(widened(step, count)) < self._cost.predict(step) else 0

    def padded(self, step: StepShape) -> StepShape:
        """The step with the rows that it is given."""
        count = self.rows(step)
        return widened(step, count) if count else step

    def predict(self, step: StepShape) -> float:
        """Milliseconds of the step once it is padded."""
        return self._cost.predict(self.padded(step) if self.is_known else step)

    def growth(self, step: StepShape, count: int) -> Sequence[float]:
        """As :meth:`~paceline.policy.cost.CostModel.growth`, of steps that are padded."""
        if not self.is_known or step.samples < step.rows:
            return self._cost.growth(step, count)
        times = self._cost.growth(step, count + REACH)
        further = [self._dips.get(step.rows + n, 0) for n in range(count + 1)]
        return [min(times[n], times[n + more]) for n, more in enumerate(further)]


def widened(step: StepShape, count: int) -> StepShape:
    """A step with further rows like those of draft nodes: sampled, and of the mean context."""
    rows, seen, context, samples, requests = step
    more = count * context / (requests or 1)
    return StepShape(rows + count, seen + more, context, samples + count, requests)


def dips(table: CostTable) -> dict[int, int]:
    """By width, how many further rows make a step cheaper; only widths at which any do.

    Of one request with all rows sampled, at all of the table's contexts.
    """
    curves = [_by_width(table.base_points(context)) for context in table.contexts]
    found = {}
    for width in set.intersection(*map(set, curves)):
        shares = {
            more: max(_most_share(curve[width], curve[width + more]) for curve in curves)
            for more in range(1, REACH + 1)
            if all(width + more in curve for curve in curves)
        }
        best = min(shares, key=shares.__getitem__, default=0)
        if best and shares[best] <= 1.0 - LEAST_GAIN:
            found[width] = best
    return found


def _by_width(points: Sequence[CostPoint]) -> dict[int, CostPoint]:
    return {point.width: point for point in points}


def _most_share(point: CostPoint, other: CostPoint) -> float:
    """How much of a step's time another takes at most: both off by the spread of what was timed."""
    return (other.ms + other.spread) / max(point.ms - point.spread, 1e-3 * point.ms)
