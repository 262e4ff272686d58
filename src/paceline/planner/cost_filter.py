"""What a cost table has wrong now: a scale of all steps, a slope with width, a residual per width.

Owns what is learnt from measured / table; knows neither the table nor what a step is.
"""

from __future__ import annotations

from math import ceil, copysign, exp, log2, sqrt

from paceline.planner.estimate import Estimate

NOISE = 0.06
"""Spread of the logarithm of a step's time about its mean."""
MEASURED, ASSUMED = 0.1, 0.5
"""Spread of the logarithm of a table's own error at one width, measured here or only assumed."""
DRIFT = 0.1
"""Variance that the scale gains with every step, in units of NOISE squared."""
SURPRISE = 3.0
"""Standard deviations beyond which one observation is not believed alone."""
MAX_VISITS = 6.0
"""Visits that a residual remembers."""
RESIDUAL_MEMORY, SLOPE_MEMORY = 300.0, 1000.0
"""Steps after which what was seen of a width, or of the slope, counts 1/e."""
AFTER_CHANGE = 0.05
"""What the visits of a width are worth after its residual has changed."""
SLOPE_VARIANCE = (0.1 / NOISE) ** 2
"""Of a slope of which nothing was seen, in units of NOISE squared: it is the machine's, so it does
not depend on the table."""
FULL_WIDTH = 16
"""The slope counts fully from this width on, and not at all for a single row; up to here each width
has a residual, wider ones share one per part of an octave."""
PARTS_OF_OCTAVE = 8
MAX_WIDTH = 1024
"""Wider steps are like this one."""


def _place(width: int) -> int:
    """Widths with one residual: each alone at first, then an eighth of an octave."""
    if width <= FULL_WIDTH:
        return max(0, width - 1)
    return FULL_WIDTH - 1 + ceil(PARTS_OF_OCTAVE * log2(width / FULL_WIDTH))


PLACES = [_place(width) for width in range(MAX_WIDTH + 1)]
WIDEST = [*{at: width for width, at in enumerate(PLACES)}.values()]
SHARES = [min(1.0, log2(width) / log2(FULL_WIDTH)) for width in WIDEST]
"""By place: how far the slope counts there."""


class CostFilter:
    """log(measured / table) as scale + share x slope + residual + noise, learnt step by step.

    Scale and slope are the state of a Kalman filter with variances in units of ``NOISE ** 2``: the
    scale follows the machine, and the slope what makes wide steps alone slower, such as another
    process on a core. A residual is what the table has wrong at one width.

    An error beyond :data:`SURPRISE` deviations is cut to that. Where the next step, or the next one
    of that width, surprises in the same direction, the states have jumped and are uncertain.

    Args:
        spread: of the logarithm of the table's own error at one width.
        is_relative: the table's unit is unknown; the first observation tells it.
    """

    def __init__(self, spread: float, is_relative: bool) -> None:
        self.knows_unit = not is_relative
        self._trust = (NOISE / spread) ** 2  # visits that the table is worth
        self._scale = self._slope = 0.0
        self._scale_variance, self._slope_variance, self._covariance = 1.0, SLOPE_VARIANCE, 0.0
        self._residuals: dict[int, Estimate] = {}
        self._surprises: dict[int, float] = {}
        self._latest_surprise = 0.0
        self._steps = 0

    def factor(self, width: int) -> float:
        """What the table's time is multiplied with."""
        at = _at(width)
        residual = self._residuals.get(at)
        level = self._scale + SHARES[at] * self._slope
        return exp(level + residual.mean(self._steps) if residual else level)

    def factors(self, width: int, count: int) -> list[float]:
        """:meth:`factor` of ``width`` to ``width + count`` rows, ``[count + 1]``."""
        residuals, steps, scale, slope = self._residuals, self._steps, self._scale, self._slope
        found: list[float] = []
        known, factor = -1, 1.0
        for at in _range(width, count):
            if at != known:
                known, residual, level = at, residuals.get(at), scale + SHARES[at] * slope
                factor = exp(level + residual.mean(steps) if residual else level)
            found.append(factor)
        return found

    def doubts(self, width: int, count: int) -> list[float]:
        """How uncertain these are, where 1 is as if no wide step was seen, ``[count + 1]``."""
        residuals, steps, unseen = self._residuals, self._steps, 1.0 / self._trust
        found: list[float] = []
        known, doubt = -1, 1.0
        for at in _range(width, count):
            if at != known:
                known, residual, share = at, residuals.get(at), SHARES[at] * SHARES[at]
                variance = share * self._slope_variance + unseen
                if residual:
                    variance += residual.variance(steps) - unseen
                doubt = sqrt(min(1.0, variance / (share * SLOPE_VARIANCE + unseen)))
            found.append(doubt)
        return found

    def deviation(self, width: int) -> float:
        """How uncertain the time of a step of so many rows is, as a logarithm."""
        at = _at(width)
        residual = self._residuals.get(at)
        spread = residual.variance(self._steps) if residual else 1.0 / self._trust
        return NOISE * sqrt(max(0.0, self._uncertainty(SHARES[at]) + spread))

    def observe(self, width: int, level: float) -> tuple[float, float]:
        """Learn from one step of so many rows; ``level`` is log(measured / table).

        Returns:
            What was wrong with :meth:`factor`'s logarithm, as far as it is believed, and the
            variance that was expected of that, in units of ``NOISE ** 2``.
        """
        at, self._steps = _at(width), self._steps + 1
        residual = self._residuals.get(at)
        if residual is None:
            residual = Estimate(0.0, self._trust, MAX_VISITS, RESIDUAL_MEMORY)
            self._residuals[at] = residual
        mean = residual.mean(self._steps)
        if not self.knows_unit:
            self.knows_unit, self._scale = True, level - mean
        share = SHARES[at]
        error = level - self._scale - share * self._slope - mean
        error = self._believed(at, error, residual)
        uncertainty, spread = self._uncertainty(share), residual.variance(self._steps)
        self._settle(share, error, spread)
        residual.learn(mean + error, self._steps, 1.0 / (1.0 + uncertainty))
        return error, uncertainty + spread + 1.0

    def _settle(self, share: float, error: float, spread: float) -> None:
        """Move scale and slope by their parts of an error; then let a step pass."""
        of_scale = self._scale_variance + share * self._covariance
        of_slope = self._covariance + share * self._slope_variance
        total = of_scale + share * of_slope + spread + 1.0
        scale_gain, slope_gain = of_scale / total, of_slope / total
        keep = 1.0 - 1.0 / SLOPE_MEMORY
        self._scale += scale_gain * error
        self._slope = keep * (self._slope + slope_gain * error)
        self._scale_variance += DRIFT - scale_gain * of_scale
        self._covariance = keep * (self._covariance - scale_gain * of_slope)
        left = self._slope_variance - slope_gain * of_slope - SLOPE_VARIANCE
        self._slope_variance = keep * keep * left + SLOPE_VARIANCE

    def _believed(self, at: int, error: float, residual: Estimate) -> float:
        """The part of an error that is believed; two in a row put everything in doubt."""
        share = SHARES[at]
        bound = self._bound(share, residual)
        if abs(error) <= bound:
            self._latest_surprise = self._surprises[at] = 0.0
            return error
        direction = copysign(1.0, error)
        if direction == self._latest_surprise:
            jump = (error / NOISE) ** 2
            self._scale_variance += jump
            self._slope_variance += share * jump
            bound = abs(error)
        elif direction == self._surprises.get(at):
            residual.forget(AFTER_CHANGE)
            self._slope_variance += share / self._trust
            bound = min(abs(error), self._bound(share, residual))
        self._latest_surprise = self._surprises[at] = direction
        return direction * bound

    def _uncertainty(self, share: float) -> float:
        """Variance of what scale and slope make of a step."""
        further = 2.0 * self._covariance + share * self._slope_variance
        return self._scale_variance + share * further

    def _bound(self, share: float, residual: Estimate) -> float:
        variance = self._uncertainty(share) + residual.variance(self._steps) + 1.0
        return SURPRISE * NOISE * sqrt(variance)


def _at(width: int) -> int:
    return PLACES[width if width < MAX_WIDTH else MAX_WIDTH]


def _range(width: int, count: int) -> list[int]:
    """The places of ``width`` to ``width + count`` rows."""
    places = PLACES[width : width + count + 1]
    return places + PLACES[-1:] * (count + 1 - len(places))
