"""What a cost table has wrong at this moment: the machine's mood, and a residual per width.

Owns what is learnt from measured / table; knows neither the table nor what a step is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, copysign, log2, sqrt

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NOISE = 0.06
"""Spread of the logarithm of a step's time about its mean."""
DRIFT = 0.1
"""Variance that the mood gains with every step, in units of NOISE squared."""
SURPRISE = 3.0
"""Standard deviations beyond which one observation is not believed alone."""
MAX_VISITS = 6.0
"""Visits that a residual remembers."""
AFTER_CHANGE = 0.05
"""What the visits of a width are worth after its residual has changed."""
EXACT_WIDTHS = 16
"""Widths up to this have a residual each; wider ones share one per eighth of an octave."""
BINS_PER_OCTAVE = 8
MAX_WIDTH = 1024
"""Wider steps share the residual of this one."""
HEARSAY = 0.01
"""What a visit counts for a width close by, where it counts 1 for its own."""
BANDWIDTH = 0.25
"""Distance in log(width) at which it counts half of that."""


@dataclass(frozen=True, slots=True)
class Trust:
    """How far a table is believed against what is observed.

    Attributes:
        spread: standard deviation of the logarithm of a residual that is to be expected.
        memory: steps after which a visit counts 1/e.
    """

    spread: float
    memory: float


MEASURED = Trust(spread=0.1, memory=50.0)
ASSUMED = Trust(spread=0.5, memory=300.0)


def _bin(width: int) -> int:
    """Index of the residual of a width."""
    if width <= EXACT_WIDTHS:
        return max(0, width - 1)
    return EXACT_WIDTHS - 1 + ceil(BINS_PER_OCTAVE * log2(width / EXACT_WIDTHS))


_BIN_OF = np.array([_bin(width) for width in range(MAX_WIDTH + 1)])


def _kernel() -> Floats:
    """What a visit to one bin counts for another: its own fully, others by their distance.

    Rational quadratic in log(width).
    """
    widest = [int(np.flatnonzero(at == _BIN_OF)[-1]) for at in range(_BIN_OF[-1] + 1)]
    logs = np.log(np.array(widest, dtype=np.float64))
    kernel: Floats = HEARSAY / (1.0 + ((logs[:, None] - logs) / BANDWIDTH) ** 2)
    np.fill_diagonal(kernel, 1.0)
    return kernel


_KERNEL = _kernel()


class Correction:
    """log(measured / table) as mood + residual of the width + noise, learnt step by step.

    A Kalman filter whose covariance is kept diagonal, with variances in units of ``NOISE**2``. A
    residual is the mean of its width's visits and, worth little, of its neighbours'
    (Nadaraya-Watson), shrunk towards zero; visits lose weight with every step.

    An error beyond :data:`SURPRISE` is cut to it. When the next step surprises in the same
    direction, the mood has jumped, and is uncertain; when only the next visit of that width does,
    its residual has changed, and what was seen of it before counts for little.

    Args:
        trust: in the table.
        is_relative: the table's unit is unknown; the first observation tells it.
    """

    def __init__(self, trust: Trust, is_relative: bool) -> None:
        self.knows_unit = not is_relative
        self._shrinkage = (NOISE / trust.spread) ** 2  # visits that the table is worth
        self._decay = 1.0 - 1.0 / trust.memory
        self._mood, self._uncertainty = 0.0, 1.0
        # [2, bins]: the weight of each bin's visits, and the weighted sum of what they saw.
        self._visits: Floats = np.zeros((2, len(_KERNEL)))
        self._surprises = [0.0] * len(_KERNEL)  # direction at each bin's last visit, 0 for none
        self._last_surprise = 0.0
        self._by_bin: Floats | None = None

    def factor(self, width: int) -> float:
        """What the table's time is multiplied with."""
        return float(self._factors()[_BIN_OF[min(width, MAX_WIDTH)]])

    def factors(self, widths: range) -> Floats:
        """What the table's times are multiplied with, ``[len(widths)]``; widths ascend by one."""
        inside = widths.stop <= len(_BIN_OF)
        at = slice(widths.start, widths.stop) if inside else np.minimum(widths, MAX_WIDTH)
        factors: Floats = self._factors()[_BIN_OF[at]]
        return factors

    def _factors(self) -> Floats:
        if self._by_bin is None:
            visits, seen = self._visits.dot(_KERNEL)
            visits += self._shrinkage
            seen /= visits
            seen += self._mood
            self._by_bin = np.exp(seen)
        return self._by_bin

    def observe(self, width: int, level: float) -> None:
        """Learn from one step of so many rows; ``level`` is log(measured / table)."""
        at = int(_BIN_OF[min(width, MAX_WIDTH)])
        visits, seen = self._visits.dot(_KERNEL[at]).tolist()
        spread = 1.0 / (visits + self._shrinkage)
        residual = seen * spread
        if not self.knows_unit:
            self.knows_unit, self._mood = True, level - residual
        error, spread = self._believe(at, level - self._mood - residual, spread)
        self._remember(at, residual + error)
        gain = self._uncertainty / (self._uncertainty + spread + 1.0)
        self._mood += gain * error
        self._uncertainty += DRIFT - gain * self._uncertainty
        self._by_bin = None

    def _believe(self, at: int, error: float, spread: float) -> tuple[float, float]:
        """The part of an error that is believed, and how uncertain that makes the residual."""
        bound = self._bound(spread)
        if abs(error) <= bound:
            self._last_surprise = self._surprises[at] = 0.0
            return error, spread
        direction = copysign(1.0, error)
        if direction == self._last_surprise:
            self._uncertainty += (error / NOISE) ** 2
            bound = abs(error)
        elif direction == self._surprises[at]:
            self._visits[:, at] *= AFTER_CHANGE
            spread = 1.0 / self._shrinkage
            bound = min(abs(error), self._bound(spread))
        self._last_surprise = self._surprises[at] = direction
        return direction * bound, spread

    def _bound(self, spread: float) -> float:
        return SURPRISE * NOISE * sqrt(self._uncertainty + spread + 1.0)

    def _remember(self, at: int, residual: float) -> None:
        """Add a visit, which is worth less the less certain the mood is."""
        weight = 1.0 / (1.0 + self._uncertainty)
        self._visits *= self._decay
        visits, seen = self._visits[:, at].tolist()
        visits, seen = visits + weight, seen + weight * residual
        keep = min(1.0, MAX_VISITS / visits)
        self._visits[0, at], self._visits[1, at] = visits * keep, seen * keep
