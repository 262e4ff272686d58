"""What a step of a mixture reads: how many experts its rows choose together, and what one costs.

    T(step) = table(step) + price x (experts that it reads - those that the table's step read)

An expert is counted once per layer, whichever and however many rows choose it, because its weights
are read once for all of them. So a draft node costs what it adds to the union. Owns the union's
growth with rows and the price, both learnt; knows neither the table nor whose the rows are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import inf
from typing import NamedTuple

from paceline.checks import check_number
from paceline.errors import ProfileError
from paceline.policy.cost_points import MAX_COUNT, MAX_MS
from paceline.policy.estimate import Estimate

TRUST, MOST = 0.1, 1.0
"""Steps of many rows that the table's union is worth, and that what was seen is worth at most."""
BISECTIONS = 40
MAX_VISITS = 6.0
"""What was seen of the price is worth at most so many steps whose time was all experts'."""


class ExpertCost(NamedTuple):
    """The mixtures of a model.

    Attributes:
        layers: that are mixtures.
        number: experts of each.
        per_token: experts that a row chooses in each.
        ms: in which one expert of one layer is read; in plain steps in a relative table.
    """

    layers: int
    number: int
    per_token: int
    ms: float

    @property
    def least(self) -> int:
        """Experts that a single row reads."""
        return self.layers * self.per_token

    @classmethod
    def from_dict(cls, data: object) -> ExpertCost:
        """What ``_asdict`` made.

        Raises:
            ProfileError: it is no such thing.
        """
        if not isinstance(data, Mapping) or set(data) != set(cls._fields):
            raise ProfileError(f"experts of a cost table must have {', '.join(cls._fields)}")
        cost = cls(**data)
        for name in ("layers", "number", "per_token"):
            value = getattr(cost, name)
            check_number(f"{name} of experts", value, 1, MAX_COUNT, int, ProfileError)
        check_number("ms of an expert", cost.ms, 0, MAX_MS, float, ProfileError)
        if cost.per_token > cost.number:
            raise ProfileError(f"a row chooses {cost.per_token} of {cost.number} experts")
        return cost


class ExpertUnion:
    """How many experts the rows of a step read together, learnt step by step.

    Rows that choose at random from ``pool`` experts of a layer leave
    ``(1 - per_token / pool) ** rows`` of the pool unread; ``1 / pool`` is how alike they are. What
    a table's step read tells how alike the rows of its text were. By how many times those of the
    text at hand are as alike is learnt.
    """

    def __init__(self, cost: ExpertCost) -> None:
        self._cost = cost
        self._times = Estimate(1.0, TRUST, MOST)

    def read(self, steps: Iterable[tuple[int, float]]) -> list[float]:
        """Experts that steps are expected to read, of all layers together.

        Args:
            steps: of each its rows, and what the table's step of as many read; infinite where rows
                choose by themselves.
        """
        times = self._times.mean()
        return [self._read(rows, of_table, times) for rows, of_table in steps]

    def _read(self, rows: int, of_table: float, times: float) -> float:
        cost = self._cost
        of_text = self._alike(rows, of_table)
        here = min(1.0 / cost.per_token, max(1.0 / cost.number, times * of_text))
        there, found = (cost.layers * union(rows, each, cost.per_token) for each in (of_text, here))
        # What the table read beyond that, by chance, it is taken to read again.
        found += 0.0 if of_table == inf else of_table - there
        return min(float(cost.layers * cost.number), max(0.0, found))

    def learn(self, rows: int, of_table: float, experts: int) -> None:
        """Take in how many experts a step of so many rows has read."""
        cost, alike = self._cost, self._alike(rows, of_table)
        highest, lowest = 1.0 / (cost.per_token * alike), 1.0 / (cost.number * alike)
        times = min(highest, max(lowest, self._times.mean()))
        expected = self._read(rows, of_table, times)
        # What rows choose in common is as uncertain as there is of it.
        common = max(1.0, rows * cost.least - expected)
        slope = cost.layers * alike * growth_of_union(rows, times * alike, cost.per_token)
        if slope:
            worth = slope * slope / common
            seen = times + (experts - expected) / slope
            self._times.learn(seen, weight=worth / (1.0 + worth))

    def _alike(self, rows: int, of_table: float) -> float:
        cost = self._cost
        return alike_of(rows, of_table / cost.layers, cost.per_token, cost.number)


def union(rows: int, alike: float, per_token: int) -> float:
    """Experts of a layer that are read by rows which choose from ``1 / alike`` at random."""
    return (1.0 - (1.0 - min(1.0, per_token * alike)) ** rows) / alike


def growth_of_union(rows: int, alike: float, per_token: int) -> float:
    """The derivative of :func:`union` by ``alike``, which is not positive."""
    left = 1.0 - min(1.0, per_token * alike)
    return (rows * per_token * left ** (rows - 1) - union(rows, alike, per_token)) / alike


@lru_cache(maxsize=4096)
def alike_of(rows: int, experts: float, per_token: int, number: int) -> float:
    """How alike rows are that read so many experts of a layer; at least ``1 / number``."""
    low, high = 1.0 / number, 1.0 / per_token
    if rows < 2 or experts >= union(rows, low, per_token):
        return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if union(rows, middle, per_token) > experts else (low, middle)
    return low


class ExpertPrices:
    """What the experts of a step add to a table's time, in the table's unit.

    Args:
        cost: as it was measured, or assumed.
        trust: steps that this is worth.
    """

    def __init__(self, cost: ExpertCost, trust: float) -> None:
        self.union, self._ms = ExpertUnion(cost), cost.ms
        self._price = Estimate(1.0, trust, MAX_VISITS)

    @property
    def ms(self) -> float:
        """In which an expert of a layer is read."""
        return self._ms * max(0.0, self._price.mean())

    def learn(self, further: float, time: float, error: float, variance: float) -> None:
        """Take in a step's error.

        Experts that the step was not expected to read have nothing to do with what else is wrong
        with its time, so what goes along with them is their price's.

        Args:
            further: experts that it read beyond the expected ones.
            time: what it was taken to be.
            error: of the logarithm of that.
            variance: of the error, in units of that of a known step.
        """
        share = self._ms * further / time
        if share:
            self._price.learn(self._price.mean() + error / share, weight=share**2 / variance)
