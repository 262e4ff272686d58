"""Paired measurements as a ratio with its uncertainty. Knows no server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000
TAILS = (0.025, 0.975)
MIN_PAIRS = 2
MIN_BLOCKS = 10
"""Blocks that a comparison is cut into where the concurrency leaves so many."""


def block_size(count: int, concurrency: int) -> int:
    """Requests of a block: enough for the concurrency, and otherwise :data:`MIN_BLOCKS` blocks."""
    return min(count, max(concurrency, -(-count // MIN_BLOCKS)))


def after(done: int, advance: Callable[[int], None]) -> Callable[[int], None]:
    """What a block calls with the number that it has done, where so many were done before it."""
    return lambda finished: advance(done + finished)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two medians, one over the other, and the middle 95 % of the bootstrap.

    Attributes:
        low, high: None where there are too few pairs to draw from.
    """

    ours: float
    theirs: float
    value: float
    low: float | None
    high: float | None
    num_pairs: int

    @property
    def interval(self) -> str:
        """The interval as text."""
        if self.low is None or self.high is None:
            return "-"
        return f"{self.low:.3f} to {self.high:.3f}"


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> Ratio | None:
    """The median of ``ours`` over that of ``theirs``; None without pairs or with a median of 0.

    The interval is the percentile bootstrap over pairs (Efron, 1979): both arms keep the same
    prompts in each draw, so that what makes a prompt slow in both does not widen it.

    Args:
        ours, theirs: of equal length, the same prompt or block in the same place.
    """
    pairs = np.array([ours, theirs], dtype=float)
    count = pairs.shape[1]
    if not count:
        return None
    above, below = (float(each) for each in np.median(pairs, axis=1))
    if not below:
        return None
    low = high = None
    if count >= MIN_PAIRS:
        drawn = np.random.default_rng(0).integers(count, size=(DRAWS, count))
        medians = np.median(pairs[:, drawn], axis=2)  # [2, draws]
        usable = medians[:, medians[1] > 0]
        low, high = (float(each) for each in np.quantile(usable[0] / usable[1], TAILS))
    return Ratio(above, below, above / below, low, high, count)
