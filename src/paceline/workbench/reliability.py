"""How far estimated probabilities are from what came true, in bins of equal width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NUM_BINS = 10


@dataclass(slots=True)
class Bin:
    """Estimates that lie in one tenth of 0..1 and whose outcome is known.

    Attributes:
        num_right: of ``count``, those that came true.
        expected: the sum of the estimates.
    """

    count: int = 0
    num_right: int = 0
    expected: float = 0.0

    @property
    def estimate(self) -> float:
        """The mean; only of a bin that is not empty, as is :attr:`accepted`."""
        return self.expected / self.count

    @property
    def accepted(self) -> float:
        return self.num_right / self.count


def reliability(outcomes: Iterable[tuple[float, bool]]) -> list[Bin]:
    """All :data:`NUM_BINS` bins over estimates, each with whether it came true."""
    bins = [Bin() for _ in range(NUM_BINS)]
    for estimate, is_right in outcomes:
        each = bins[min(int(estimate * NUM_BINS), NUM_BINS - 1)]
        each.count += 1
        each.num_right += is_right
        each.expected += estimate
    return bins


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: the mean over estimates of their bin's deviation."""
    count = sum(each.count for each in bins)
    return sum(abs(each.expected - each.num_right) for each in bins) / count if count else 0.0
