"""What a cost table has wrong now: the machine's mood, its tilt, and a residual per width.

Owns what is learnt from measured / table; knows neither the table nor what a step is. The native
``Correction`` learns and predicts the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, copysign, exp, log2, sqrt

import numpy as np

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
TILTED_WIDTH = 16
"""The tilt counts fully from this width on, and not at all for a single row."""
TILT_MEMORY = 1000.0
"""Steps after which a tilt of which nothing more is seen has faded to 1/e."""
TILT_VARIANCE = (0.1 / NOISE) ** 2
"""Of a tilt of which nothing was seen, in units of NOISE squared: it is the machine's, so it does
not depend on how far a table is believed."""
TILT_DECAY = 1.0 - 1.0 / TILT_MEMORY
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

    @property
    def visits(self) -> float:
        """Visits that the table is worth."""
        return float((NOISE / self.spread) ** 2)


MEASURED = Trust(spread=0.1, memory=50.0)
ASSUMED = Trust(spread=0.5, memory=300.0)


def _bin(width: int) -> int:
    """Index of the residual of a width."""
    if width <= EXACT_WIDTHS:
        return max(0, width - 1)
    return EXACT_WIDTHS - 1 + ceil(BINS_PER_OCTAVE * log2(width / EXACT_WIDTHS))


BINS = [_bin(width) for width in range(MAX_WIDTH + 1)]
"""By width: the index of its residual."""


WIDEST = [*{at: width for width, at in enumerate(BINS)}.values()]
"""By bin: the largest width in it."""
SLOPES = [min(1.0, log2(width) / log2(TILTED_WIDTH)) for width in WIDEST]
"""By bin: how far the tilt counts there."""


def _kernel() -> list[list[float]]:
    """What a visit to one bin counts for another: its own fully, others by their distance.

    Rational quadratic in log(width), hence symmetric.
    """
    logs = np.log(np.array(WIDEST, dtype=np.float64))
    kernel = HEARSAY / (1.0 + ((logs[:, None] - logs) / BANDWIDTH) ** 2)
    np.fill_diagonal(kernel, 1.0)
    rows: list[list[float]] = kernel.tolist()
    return rows


KERNEL = _kernel()
FORGOTTEN = 1e-6
"""Visits that weigh less are dropped."""


class Correction:
    """log(measured / table) as mood + slope x tilt + residual + noise, learnt step by step.

    The mood is of all steps, the tilt of wide ones as far as they are wide: a taken core, or memory
    that somebody else reads, makes wide steps another multiple of narrow ones. Both are the state
    of a Kalman filter with variances in units of ``NOISE**2``. A residual is the mean of its
    width's visits and, worth little, of its neighbours' (Nadaraya-Watson), shrunk towards zero;
    visits lose weight with every step.

    An error beyond :data:`SURPRISE` is cut to it. When the next step surprises in the same
    direction, mood or tilt have jumped, and are uncertain; when only the next visit of that width
    does, its residual or the tilt has changed, and what was seen of it before counts for little.

    Args:
        trust: in the table.
        is_relative: the table's unit is unknown; the first observation tells it.
    """

    def __init__(self, trust: Trust, is_relative: bool) -> None:
        self.knows_unit = not is_relative
        self._shrinkage = trust.visits
        self._decay = 1.0 - 1.0 / trust.memory
        self._mood = self._tilt = 0.0
        # Variances of mood and tilt, and their covariance.
        self._mood_variance, self._tilt_variance, self._covariance = 1.0, TILT_VARIANCE, 0.0
        self._ambiguous = 0.0  # slope of steps that have changed, until a narrower one is seen
        # By bin the weight of its visits and the weighted sum of what they saw, in units of _worth:
        # that alone loses weight with every step.
        self._visits: dict[int, tuple[float, float]] = {}
        self._worth = 1.0
        self._surprises = [0.0] * len(KERNEL)  # direction at each bin's last visit, 0 for none
        self._last_surprise = 0.0
        self._heard: dict[int, tuple[float, float]] = {}  # what _hear said since the last visit

    def is_ambiguous(self, width: int) -> bool:
        """Whether steps have changed of which none was so narrow, so that it is not known whether
        steps of so many rows have changed too."""
        return SLOPES[BINS[min(width, MAX_WIDTH)]] < self._ambiguous

    def factor(self, width: int) -> float:
        """What the table's time is multiplied with."""
        at = BINS[width if width < MAX_WIDTH else MAX_WIDTH]
        visits, seen = self._heard.get(at) or self._hear(at)
        return exp(self._mood + SLOPES[at] * self._tilt + seen / (visits + self._shrinkage))

    def growth(self, times: Sequence[float], width: int, count: int) -> list[float]:
        """The times of steps of ``width`` to ``width + count`` rows, given those of the table.

        There may be further times, of wider steps.
        """
        factor = self.factor
        return [time * factor(at) for at, time in enumerate(times[: count + 1], start=width)]

    def _hear(self, at: int) -> tuple[float, float]:
        """The weight of the visits that speak for a bin, and the weighted sum of what they saw."""
        row, visits, seen = KERNEL[at], 0.0, 0.0
        for other, (weight, total) in self._visits.items():
            visits += row[other] * weight
            seen += row[other] * total
        heard = self._heard[at] = visits * self._worth, seen * self._worth
        return heard

    def observe(self, width: int, level: float) -> None:
        """Learn from one step of so many rows; ``level`` is log(measured / table)."""
        at = BINS[min(width, MAX_WIDTH)]
        slope = SLOPES[at]
        visits, seen = self._heard.get(at) or self._hear(at)
        spread = 1.0 / (visits + self._shrinkage)
        residual = seen * spread
        if not self.knows_unit:
            self.knows_unit, self._mood = True, level - residual
        if slope < self._ambiguous:
            self._ambiguous = 0.0
        error = level - self._mood - slope * self._tilt - residual
        error, spread = self._believe(at, error, spread)
        self._remember(at, residual + error)
        self._settle(slope, error, spread)
        self._heard.clear()

    def _settle(self, slope: float, error: float, spread: float) -> None:
        """Move mood and tilt by their parts of an error; then let a step pass."""
        of_mood = self._mood_variance + slope * self._covariance
        of_tilt = self._covariance + slope * self._tilt_variance
        total = of_mood + slope * of_tilt + spread + 1.0
        mood_gain, tilt_gain = of_mood / total, of_tilt / total
        self._mood += mood_gain * error
        self._tilt = TILT_DECAY * (self._tilt + tilt_gain * error)
        self._mood_variance += DRIFT - mood_gain * of_mood
        self._covariance = TILT_DECAY * (self._covariance - mood_gain * of_tilt)
        left = self._tilt_variance - tilt_gain * of_tilt - TILT_VARIANCE
        self._tilt_variance = TILT_DECAY * TILT_DECAY * left + TILT_VARIANCE

    def _believe(self, at: int, error: float, spread: float) -> tuple[float, float]:
        """The part of an error that is believed, and how uncertain that makes the residual."""
        slope = SLOPES[at]
        bound = self._bound(slope, spread)
        if abs(error) <= bound:
            self._last_surprise = self._surprises[at] = 0.0
            return error, spread
        direction = copysign(1.0, error)
        if direction == self._last_surprise:
            jump = (error / NOISE) * (error / NOISE)
            self._mood_variance += jump
            self._tilt_variance += slope * jump
            self._ambiguous = slope
            bound = abs(error)
        elif direction == self._surprises[at]:
            weight, total = self._visits.get(at, (0.0, 0.0))
            self._visits[at] = AFTER_CHANGE * weight, AFTER_CHANGE * total
            spread = 1.0 / self._shrinkage
            self._tilt_variance += slope * spread
            bound = min(abs(error), self._bound(slope, spread))
        self._last_surprise = self._surprises[at] = direction
        return direction * bound, spread

    def _uncertainty(self, slope: float) -> float:
        """Variance of what mood and tilt make of a step."""
        further = 2.0 * self._covariance + slope * self._tilt_variance
        return self._mood_variance + slope * further

    def _bound(self, slope: float, spread: float) -> float:
        return SURPRISE * NOISE * sqrt(self._uncertainty(slope) + spread + 1.0)

    def _remember(self, at: int, residual: float) -> None:
        """Add a visit, which is worth less the less certain mood and tilt are."""
        self._worth *= self._decay
        weight = 1.0 / ((1.0 + self._uncertainty(SLOPES[at])) * self._worth)
        visits, seen = self._visits.get(at, (0.0, 0.0))
        visits, seen = visits + weight, seen + weight * residual
        keep = min(1.0, MAX_VISITS / (visits * self._worth))
        self._visits[at] = visits * keep, seen * keep
        if self._worth < FORGOTTEN:
            self._renew()

    def _renew(self) -> None:
        """Begin to count in whole visits again, without those that are forgotten."""
        worth, self._worth = self._worth, 1.0
        self._visits = {
            at: (weight * worth, total * worth)
            for at, (weight, total) in self._visits.items()
            if weight * worth > FORGOTTEN
        }
