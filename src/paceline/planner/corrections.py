"""What a cost table has wrong now, learnt from measured steps.

* :class:`CostFilter`: log(measured / table) as a scale of all steps, a slope with width, and a
  residual of each width.
* :class:`ExpertUnion` and :class:`ExpertPrices`: of a mixture, how many experts the rows of a step
  choose together, and what one costs:

      T(step) = table(step) + price x (experts that it reads - those that the table's step read)

  An expert is counted once per layer, whichever and however many rows choose it, because its
  weights are read once for all of them. So a draft node costs what it adds to the union.

Knows neither the table nor whose the rows are.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import ceil, copysign, exp, inf, log2, sqrt

from paceline.planner.cost_table import ExpertCost

NOISE = 0.06
"""Spread of the logarithm of a step's time about its mean."""
MEASURED, ASSUMED = 0.1, 0.5
"""Spread of the logarithm of a table's own error at one width, measured here or only assumed."""
DRIFT = 0.1
"""Variance that the scale gains with every step, in units of NOISE squared."""
SURPRISE = 3.0
"""Standard deviations beyond which one observation is not believed alone."""
MOST_DISK = 64.0
"""Steps that what was seen of a cache is worth at most; what is expected of it is worth one."""
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
UNION_TRUST = 0.1
"""Steps of many rows that the table's union is worth; what was seen is worth one at most."""
GUESS = 0.01
"""The same where no table says it: no more than a beginning."""
BISECTIONS = 40
DISK = 8.0
"""By how many times weights take longer that come from disk, about. Where most experts do, reading
them is all that a step takes, whatever this is."""


class Estimate:
    """The mean of what was seen, which counts less with age, drawn towards a prior.

    Its variance, in units of that of one observation, is ``1 / (trust + weight of what was seen)``:
    it grows with age to that of the prior.

    Args:
        prior: the mean before anything was seen.
        trust: observations that the prior is worth.
        most: observations that what was seen is worth at most.
        memory: age at which an observation counts 1/e.
    """

    __slots__ = ("_at", "_memory", "_most", "_prior", "_seen", "_trust", "_weight")

    def __init__(self, prior: float, trust: float, most: float = inf, memory: float = inf) -> None:
        self._prior, self._trust, self._most, self._memory = prior, trust, most, memory
        self._seen = self._weight = self._at = 0.0

    def mean(self, now: float = 0.0) -> float:
        weight = self._weight and self._weight * exp((self._at - now) / self._memory)
        return (self._trust * self._prior + weight * self._seen) / (self._trust + weight)

    def variance(self, now: float = 0.0) -> float:
        weight = self._weight and self._weight * exp((self._at - now) / self._memory)
        return 1.0 / (self._trust + weight)

    def learn(self, value: float, now: float = 0.0, weight: float = 1.0) -> None:
        """Take in an observation that is worth so many."""
        left = self._weight and self._weight * exp((self._at - now) / self._memory)
        self._weight, self._at = left + weight, now
        self._seen += weight / self._weight * (value - self._seen)
        self._weight = min(self._weight, self._most)

    def forget(self, part: float) -> None:
        """Let what was seen count for no more than such a part of what it did."""
        self._weight *= part


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
        at = PLACES[min(width, MAX_WIDTH)]
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
        at = PLACES[min(width, MAX_WIDTH)]
        residual = self._residuals.get(at)
        spread = residual.variance(self._steps) if residual else 1.0 / self._trust
        return NOISE * sqrt(max(0.0, self._uncertainty(SHARES[at]) + spread))

    def observe(self, width: int, level: float) -> tuple[float, float]:
        """Learn from one step of so many rows; ``level`` is log(measured / table).

        Returns:
            What was wrong with :meth:`factor`'s logarithm, as far as it is believed, and the
            variance that was expected of that, in units of ``NOISE ** 2``.
        """
        at, self._steps = PLACES[min(width, MAX_WIDTH)], self._steps + 1
        residual = self._residuals.get(at)
        if residual is None:
            residual = Estimate(0.0, self._trust, MAX_VISITS, RESIDUAL_MEMORY)
            self._residuals[at] = residual
        mean = residual.mean(self._steps)
        if not self.knows_unit:
            self.knows_unit, self._scale = True, level - mean
        share = SHARES[at]
        error = level - self._scale - share * self._slope - mean
        uncertainty, spread = self._uncertainty(share), residual.variance(self._steps)
        bound = SURPRISE * NOISE * sqrt(uncertainty + spread + 1.0)
        if abs(error) <= bound:
            self._latest_surprise = self._surprises[at] = 0.0
        else:
            error = self._surprised(at, error, bound, residual)
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

    def _surprised(self, at: int, error: float, bound: float, residual: Estimate) -> float:
        """The part of a large error that is believed; two in a row put everything in doubt."""
        share = SHARES[at]
        direction = copysign(1.0, error)
        if direction == self._latest_surprise:
            jump = (error / NOISE) ** 2
            self._scale_variance += jump
            self._slope_variance += share * jump
            bound = abs(error)
        elif direction == self._surprises.get(at):
            residual.forget(AFTER_CHANGE)
            self._slope_variance += share / self._trust
            variance = self._uncertainty(share) + residual.variance(self._steps) + 1.0
            bound = min(abs(error), SURPRISE * NOISE * sqrt(variance))
        self._latest_surprise = self._surprises[at] = direction
        return direction * bound

    def _uncertainty(self, share: float) -> float:
        """Variance of what scale and slope make of a step."""
        further = 2.0 * self._covariance + share * self._slope_variance
        return self._scale_variance + share * further


def _range(width: int, count: int) -> list[int]:
    """The places of ``width`` to ``width + count`` rows."""
    places = PLACES[width : width + count + 1]
    return places + PLACES[-1:] * (count + 1 - len(places))


class ExpertUnion:
    """How many experts the rows of a step read together, learnt step by step.

    A request's rows that choose at random from ``pool`` experts of a layer leave
    ``(1 - per_token / pool) ** rows`` of the pool unread; ``1 / pool`` is how alike they are.
    Several requests choose by themselves. What a table's step read tells how alike the rows of its
    text were. By how many times those of the text at hand are as alike is learnt.

    Args:
        is_measured: whether a table says anything of a text. If not, all rows of a request are
            taken to choose alike until a step has shown otherwise: whoever took them to choose by
            themselves might never draft and never see.
    """

    def __init__(self, cost: ExpertCost, is_measured: bool = True) -> None:
        self._cost = cost
        first, trust = (1.0, UNION_TRUST) if is_measured else (cost.number / cost.per_token, GUESS)
        self._times = Estimate(first, trust, 1.0)

    def read(self, steps: Iterable[tuple[int, float]], requests: int = 1) -> list[float]:
        """Experts that steps are expected to read, of all layers together.

        Args:
            steps: of each its rows, and what the table's step of as many read; infinite where rows
                choose by themselves.
            requests: that the rows belong to, as many to each.
        """
        times, whole = self._times.mean(), float(self._cost.layers * self._cost.number)
        found = []
        for rows, of_table in steps:
            of_text = self._alike(rows, of_table, requests)
            read = self._read(rows, self._bounded(times * of_text), requests)
            if of_table < inf:  # beyond what such rows read on average, if by chance
                read += of_table - self._read(rows, of_text, requests)
            found.append(min(whole, max(0.0, read)))
        return found

    def learn(self, rows: int, of_table: float, experts: int, requests: int = 1) -> float:
        """Take in how many experts a step of so many rows has read; returns what was expected."""
        of_text = self._alike(rows, of_table, requests)
        alike = self._bounded(self._times.mean() * of_text)
        (expected,) = self.read([(rows, of_table)], requests)
        cost, each = self._cost, rows / requests
        left = 1.0 - union(each, alike, cost.per_token) / cost.number
        by_request = growth_of_union(each, alike, cost.per_token)
        slope = cost.layers * requests * left ** (requests - 1) * by_request * of_text
        if slope:
            # What rows choose in common is as uncertain as there is of it.
            worth = slope * slope / max(1.0, rows * cost.least - expected)
            seen = alike / of_text + (experts - expected) / slope
            self._times.learn(seen, weight=worth / (1.0 + worth))
        return expected

    def _read(self, rows: int, alike: float, requests: int) -> float:
        cost = self._cost
        unread = 1.0 - union(rows / requests, alike, cost.per_token) / cost.number
        return cost.layers * cost.number * (1.0 - max(0.0, unread) ** requests)

    def _alike(self, rows: int, of_table: float, requests: int) -> float:
        """How alike the table's rows of a request are."""
        cost = self._cost
        unread = max(0.0, 1.0 - of_table / (cost.layers * cost.number))
        of_one = cost.number * (1.0 - unread ** (1.0 / requests))
        return alike_of(rows / requests, of_one, cost.per_token, cost.number)

    def _bounded(self, alike: float) -> float:
        return min(1.0 / self._cost.per_token, max(1.0 / self._cost.number, alike))


def union(rows: float, alike: float, per_token: int) -> float:
    """Experts of a layer that are read by rows which choose from ``1 / alike`` at random.

    Less than one row reads as much as one.
    """
    rows = max(1.0, rows)
    left: float = (1.0 - min(1.0, per_token * alike)) ** rows
    return (1.0 - left) / alike


def growth_of_union(rows: float, alike: float, per_token: int) -> float:
    """The derivative of :func:`union` by ``alike``, which is not positive."""
    rows = max(1.0, rows)
    left: float = (1.0 - min(1.0, per_token * alike)) ** (rows - 1.0)
    return (rows * per_token * left - union(rows, alike, per_token)) / alike


@lru_cache(maxsize=4096)
def alike_of(rows: float, experts: float, per_token: int, number: int) -> float:
    """How alike rows are that read so many experts of a layer; at least ``1 / number``."""
    low, high = 1.0 / number, 1.0 / per_token
    if rows <= 1 or experts >= union(rows, low, per_token):
        return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if union(rows, middle, per_token) > experts else (low, middle)
    return low


class ExpertPrices:
    """What the experts of a step add to a table's time, in the table's unit.

    Where some come from disk, a table that is no measurement knows nothing of it. An expert costs
    what its reading costs, on average, over by how much that makes a plain step longer, which
    whoever corrects the table for this machine sees anyway. A measured table has that in it, for
    the share that is expected; what another share changes is counted alike.

    Args:
        cost: as it was measured, or assumed.
        trust: steps that this is worth.
        is_measured: as of :class:`ExpertUnion`.
        plain_ms: of a step of one row, in the table.
        from_disk: which share of the experts that are read is expected to come from disk.
    """

    def __init__(
        self,
        cost: ExpertCost,
        trust: float,
        is_measured: bool = True,
        plain_ms: float = 1.0,
        from_disk: float = 0.0,
    ) -> None:
        self.union, self._ms = ExpertUnion(cost, is_measured), cost.ms
        self._price = Estimate(1.0, trust, MAX_VISITS)
        self._plain = min(1.0, cost.least * cost.ms / plain_ms)
        self._from_disk = Estimate(from_disk, 1.0, MOST_DISK) if from_disk else None
        self._in_table = self._longer() if is_measured else 1.0

    @property
    def ms(self) -> float:
        """In which an expert of a layer is read."""
        return self._unpriced() * max(0.0, self._price.mean())

    def _unpriced(self) -> float:
        return self._ms * self._longer() / self._in_table

    def _disk(self) -> float:
        """What an expert's reading from disk takes on average, in readings from memory."""
        return DISK * max(0.0, self._from_disk.mean()) if self._from_disk else 0.0

    def _longer(self) -> float:
        """By what a reading takes longer than from memory, over by what a plain step does."""
        return (1.0 + self._disk()) / (1.0 + self._plain * self._disk())

    def count(self, read: int, fetched: int) -> None:
        """Take in of how many experts that a step read how many came from disk."""
        if self._from_disk and read:
            self._from_disk.learn(fetched / read)

    def beyond(self, read: int, fetched: int, expected: float) -> float:
        """Experts that a step read beyond the expected ones; those from disk count accordingly."""
        from_disk = self._disk() / DISK
        further = read - expected + DISK * (fetched - from_disk * expected)
        return further / (1.0 + self._disk())

    def learn(self, further: float, time: float, error: float, variance: float) -> None:
        """Take in a step's error.

        Experts that the step was not expected to read have nothing to do with what else is wrong
        with its time, so what goes along with them is their price's.

        Args:
            further: experts that it read :meth:`beyond` the expected ones.
            time: what it was taken to be.
            error: of the logarithm of that.
            variance: of the error, in units of that of a known step.
        """
        share = self._unpriced() * further / time
        if share:
            self._price.learn(self._price.mean() + error / share, weight=share**2 / variance)
