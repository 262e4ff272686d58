"""What a cost table has wrong now, learnt from measured steps.

* :class:`CostFilter`: log(measured / table) as a scale of all steps, a slope with width, and a
  residual of each width.
* :class:`ExpertUnion` and :class:`ExpertPrices`: how many experts of a mixture the rows of a step
  choose together, and what an expert costs:

      T(step) = table(step) + price x (experts that it reads - those that the table's step read)

  An expert's weights are read once for all rows that choose it, so a draft node costs what it adds
  to the union.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import ceil, copysign, exp, inf, log2, sqrt

from paceline.planner.cost_table import ExpertCost

NOISE = 0.06
"""Standard deviation of the logarithm of a step's time."""
DRIFT = 0.1
"""Variance that the scale gains with every step, in units of NOISE squared."""
SURPRISE = 3.0
"""Standard deviations beyond which a single observation is not believed."""
MAX_VISITS = 6.0
"""Observations that what was seen of one width is worth at most."""
FULL_WIDTH = 16
"""The slope counts fully from this width on, and not at all for a single row. Up to here each width
has its own residual; wider ones share one per eighth of an octave."""
MAX_WIDTH = 1024
"""Wider steps are treated as this one."""
DISK = 8.0
"""How many times as long weights take that come from disk, roughly. Where most of them do, reading
them is all that a step takes, whatever the value."""


class Estimate:
    """The mean of observations, which lose weight with age, drawn towards a prior.

    Args:
        prior: the mean before anything was seen.
        trust: number of observations that the prior is worth.
        most: number of observations that what was seen is worth at most.
        memory: age at which an observation counts 1/e.
    """

    __slots__ = ("_at", "_memory", "_most", "_prior", "_seen", "_trust", "_weight")

    def __init__(self, prior: float, trust: float, most: float = inf, memory: float = inf) -> None:
        self._prior, self._trust, self._most, self._memory = prior, trust, most, memory
        self._seen = self._weight = self._at = 0.0

    def mean(self, now: float = 0.0) -> float:
        return self.state(now)[0]

    def state(self, now: float = 0.0) -> tuple[float, float]:
        """Mean, and variance in units of that of one observation."""
        weight = self._weight and self._weight * exp((self._at - now) / self._memory)
        total = self._trust + weight
        return (self._trust * self._prior + weight * self._seen) / total, 1.0 / total

    def learn(self, value: float, now: float = 0.0, weight: float = 1.0) -> None:
        left = self._weight and self._weight * exp((self._at - now) / self._memory)
        self._weight, self._at = left + weight, now
        self._seen += weight / self._weight * (value - self._seen)
        self._weight = min(self._weight, self._most)

    def forget(self, factor: float) -> None:
        self._weight *= factor


def _place(width: int) -> int:
    """Index of a width's residual."""
    if width <= FULL_WIDTH:
        return max(0, width - 1)
    return FULL_WIDTH - 1 + ceil(8 * log2(width / FULL_WIDTH))


def _shares() -> list[float]:
    """How much the slope counts at each place, by the widest step there."""
    widest = {at: width for width, at in enumerate(PLACES)}
    return [min(1.0, log2(width) / log2(FULL_WIDTH)) for width in widest.values()]


PLACES = [_place(width) for width in range(MAX_WIDTH + 1)]
SHARES = _shares()


class CostFilter:
    """log(measured / table) as scale + share x slope + residual + noise, learnt step by step.

    Scale and slope are the state of a Kalman filter with variances in units of ``NOISE ** 2``. The
    slope follows what slows down wide steps only, such as another process on a core. A residual is
    the table's error at one width. An error beyond :data:`SURPRISE` standard deviations is cut to
    that. If the next step, or the next one of that width, errs in the same direction, the state has
    jumped and becomes uncertain. The native ``CostFilter`` does the same to the last bit.

    Args:
        spread: standard deviation of the logarithm of the table's own error at one width.
        is_relative: the table's unit is unknown; the first observation sets it.
    """

    def __init__(self, spread: float, is_relative: bool) -> None:
        self.knows_unit = not is_relative
        self._trust = (NOISE / spread) * (NOISE / spread)  # observations that the table is worth
        self._scale = self._slope = 0.0
        # In units of NOISE squared. The slope belongs to the machine, whatever the table.
        self._unseen_slope = (0.1 / NOISE) * (0.1 / NOISE)
        self._scale_variance, self._slope_variance, self._covariance = 1.0, self._unseen_slope, 0.0
        self._residuals: dict[int, Estimate] = {}
        self._surprises: dict[int, float] = {}
        self._latest_surprise = 0.0
        self._steps = 0

    def factor(self, width: int) -> float:
        """What the table's time is multiplied by."""
        at = PLACES[min(width, MAX_WIDTH)]
        residual = self._residuals.get(at)
        level = self._scale + SHARES[at] * self._slope
        return exp(level + residual.state(self._steps)[0] if residual else level)

    def corrected(self, width: int, times: Sequence[float]) -> list[float]:
        """The table's times of ``width`` rows and more, one after another, each by its factor."""
        return [ms * self.factor(width + further) for further, ms in enumerate(times)]

    def doubts(self, width: int, count: int) -> list[float]:
        """How uncertain the factors of ``width`` to ``width + count`` rows are: 1 is as if no wide
        step was seen, ``[count + 1]``."""
        return [self._doubt(width + further) for further in range(count + 1)]

    def _doubt(self, width: int) -> float:
        at, unseen = PLACES[min(width, MAX_WIDTH)], 1.0 / self._trust
        residual, share = self._residuals.get(at), SHARES[at] * SHARES[at]
        variance = share * self._slope_variance + unseen
        if residual:
            variance += residual.state(self._steps)[1] - unseen
        return sqrt(min(1.0, variance / (share * self._unseen_slope + unseen)))

    def deviation(self, width: int) -> float:
        """Standard deviation of the logarithm of the time of a step of ``width`` rows."""
        at = PLACES[min(width, MAX_WIDTH)]
        residual = self._residuals.get(at)
        spread = residual.state(self._steps)[1] if residual else 1.0 / self._trust
        return NOISE * sqrt(max(0.0, self._uncertainty(SHARES[at]) + spread))

    def observe(self, width: int, level: float) -> tuple[float, float]:
        """Learn from one step of ``width`` rows; ``level`` is log(measured / table).

        Returns:
            The error of :meth:`factor`'s logarithm as far as it is believed, and the variance that
            was expected of it, in units of ``NOISE ** 2``.
        """
        at, self._steps = PLACES[min(width, MAX_WIDTH)], self._steps + 1
        residual = self._residuals.get(at)
        if residual is None:
            residual = Estimate(0.0, self._trust, MAX_VISITS, memory=300.0)
            self._residuals[at] = residual
        mean, spread = residual.state(self._steps)
        if not self.knows_unit:
            self.knows_unit, self._scale = True, level - mean
        share = SHARES[at]
        error = level - self._scale - share * self._slope - mean
        uncertainty = self._uncertainty(share)
        bound = SURPRISE * NOISE * sqrt(uncertainty + spread + 1.0)
        if abs(error) <= bound:
            self._latest_surprise = self._surprises[at] = 0.0
        else:
            error = self._surprised(at, error, bound, residual)
            uncertainty, spread = self._uncertainty(share), residual.state(self._steps)[1]
        self._settle(share, error, spread)
        residual.learn(mean + error, self._steps, 1.0 / (1.0 + uncertainty))
        return error, uncertainty + spread + 1.0

    def _settle(self, share: float, error: float, spread: float) -> None:
        """Move scale and slope by their parts of an error, and let a step pass."""
        of_scale = self._scale_variance + share * self._covariance
        of_slope = self._covariance + share * self._slope_variance
        total = of_scale + share * of_slope + spread + 1.0
        scale_gain, slope_gain = of_scale / total, of_slope / total
        keep = 1.0 - 1.0 / 1000.0  # what was seen of the slope counts 1/e after a thousand steps
        self._scale += scale_gain * error
        self._slope = keep * (self._slope + slope_gain * error)
        self._scale_variance += DRIFT - scale_gain * of_scale
        self._covariance = keep * (self._covariance - scale_gain * of_slope)
        left = self._slope_variance - slope_gain * of_slope - self._unseen_slope
        self._slope_variance = keep * keep * left + self._unseen_slope

    def _surprised(self, at: int, error: float, bound: float, residual: Estimate) -> float:
        """The part of a large error that is believed; two in a row make the state uncertain."""
        share = SHARES[at]
        direction = copysign(1.0, error)
        if direction == self._latest_surprise:
            jump = (error / NOISE) * (error / NOISE)
            self._scale_variance += jump
            self._slope_variance += share * jump
            bound = abs(error)
        elif direction == self._surprises.get(at):
            residual.forget(0.05)  # it has changed
            self._slope_variance += share / self._trust
            variance = self._uncertainty(share) + residual.state(self._steps)[1] + 1.0
            bound = min(abs(error), SURPRISE * NOISE * sqrt(variance))
        self._latest_surprise = self._surprises[at] = direction
        return direction * bound

    def _uncertainty(self, share: float) -> float:
        """Variance of scale + share x slope."""
        further = 2.0 * self._covariance + share * self._slope_variance
        return self._scale_variance + share * further


class ExpertUnion:
    """How many experts the rows of a step read together, learnt step by step.

    Each row of a request is taken to choose at random from ``pool`` experts of a layer, so that
    ``(1 - per_token / pool) ** rows`` of the pool stay unread; ``1 / pool`` says how alike the rows
    are. Requests choose independently. A table's step shows how alike the rows of its text were;
    how many times as alike those of the present text are is learnt.

    Args:
        is_measured: the table knows what its steps read. If not, the rows of a request are taken to
            choose alike until a step has shown otherwise: otherwise none might ever be drafted.
    """

    def __init__(self, cost: ExpertCost, is_measured: bool = True) -> None:
        self._cost = cost
        self._times = Estimate(1.0, 0.1, 1.0)  # what was measured of a text says little of others
        if not is_measured:
            self._times = Estimate(cost.number / cost.per_token, 0.01, 1.0)

    def read(self, steps: Iterable[tuple[int, float]], requests: int = 1) -> list[float]:
        """Experts that steps are expected to read, of all layers together.

        Args:
            steps: rows of each, which belong to the requests alike, and experts that the table's
                step of as many rows read; infinity where rows choose independently.
        """
        times, whole = self._times.mean(), float(self._cost.layers * self._cost.number)
        expected = []
        for rows, of_table in steps:
            of_text = self._alike(rows, of_table, requests)
            read = self._read(rows, self._bounded(times * of_text), requests)
            if of_table < inf:  # add what the table's text read beyond the average of such rows
                read += of_table - self._read(rows, of_text, requests)
            expected.append(min(whole, max(0.0, read)))
        return expected

    def learn(self, rows: int, of_table: float, experts: int, requests: int = 1) -> float:
        """Take in how many experts a step has read; returns how many were expected."""
        of_text = self._alike(rows, of_table, requests)
        alike = self._bounded(self._times.mean() * of_text)
        (expected,) = self.read([(rows, of_table)], requests)
        cost, of_request = self._cost, rows / requests
        left = 1.0 - union(of_request, alike, cost.per_token) / cost.number
        by_request = _growth_of_union(of_request, alike, cost.per_token)
        slope = cost.layers * requests * left ** (requests - 1) * by_request * of_text
        if slope:
            # The number that rows choose in common has a variance as large as itself.
            worth = slope * slope / max(1.0, rows * cost.least - expected)
            seen = alike / of_text + (experts - expected) / slope
            self._times.learn(seen, weight=worth / (1.0 + worth))
        return expected

    def _read(self, rows: int, alike: float, requests: int) -> float:
        cost = self._cost
        unread = 1.0 - union(rows / requests, alike, cost.per_token) / cost.number
        return cost.layers * cost.number * (1.0 - max(0.0, unread) ** requests)

    def _alike(self, rows: int, of_table: float, requests: int) -> float:
        """How alike the table's rows of a request were."""
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


def _growth_of_union(rows: float, alike: float, per_token: int) -> float:
    """The derivative of :func:`union` by ``alike``, which is not positive."""
    rows = max(1.0, rows)
    left: float = (1.0 - min(1.0, per_token * alike)) ** (rows - 1.0)
    return (rows * per_token * left - union(rows, alike, per_token)) / alike


@lru_cache(maxsize=4096)
def alike_of(rows: float, experts: float, per_token: int, number: int) -> float:
    """How alike rows are that read this many experts of a layer; at least ``1 / number``."""
    low, high = 1.0 / number, 1.0 / per_token
    if rows <= 1 or experts >= union(rows, low, per_token):
        return low
    for _ in range(40):  # bisection, to more than the digits of the answer
        middle = (low + high) / 2
        low, high = (middle, high) if union(rows, middle, per_token) > experts else (low, middle)
    return low


class ExpertPrices:
    """What the experts of a step add to a table's time, in the table's unit.

    An assumed table does not know that experts come from disk. An expert then costs its average
    reading, divided by the factor by which disk makes a plain step longer, because that factor is
    corrected elsewhere for all steps. A measured table includes the share from disk that is
    expected; only a change of that share is added.

    Args:
        trust: steps that the measured or assumed cost is worth.
        is_measured: as in :class:`ExpertUnion`.
        plain_ms: of a step of one row, in the table.
        from_disk: share of the experts read that is expected to come from disk.
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
        # What is expected is worth one step, and what was seen no more than 64.
        self._from_disk = Estimate(from_disk, 1.0, 64.0) if from_disk else None
        self._in_table = self._longer() if is_measured else 1.0

    @property
    def ms(self) -> float:
        """Time in which an expert of a layer is read."""
        return self._unpriced() * max(0.0, self._price.mean())

    def _unpriced(self) -> float:
        return self._ms * self._longer() / self._in_table

    def _disk(self) -> float:
        """Average time of an expert's reading from disk, in readings from memory."""
        return DISK * max(0.0, self._from_disk.mean()) if self._from_disk else 0.0

    def _longer(self) -> float:
        """The factor of a reading over one from memory, divided by that of a plain step."""
        return (1.0 + self._disk()) / (1.0 + self._plain * self._disk())

    def count(self, read: int, fetched: int) -> None:
        """Take in how many of the experts that a step read came from disk."""
        if self._from_disk and read:
            self._from_disk.learn(fetched / read)

    def beyond(self, read: int, fetched: int, expected: float) -> float:
        """Experts beyond the expected ones, weighted by where they came from."""
        from_disk = self._disk() / DISK
        further = read - expected + DISK * (fetched - from_disk * expected)
        return further / (1.0 + self._disk())

    def learn(self, further: float, time: float, error: float, variance: float) -> None:
        """Take in a step that read ``further`` experts :meth:`beyond` the expected ones.

        These are independent of everything else that is wrong with its predicted time, so what
        correlates with them is due to their price.

        Args:
            error: of the prediction's logarithm.
            variance: of the error, in units of that of a known step.
        """
        share = self._unpriced() * further / time
        if share:
            self._price.learn(self._price.mean() + error / share, weight=share**2 / variance)
