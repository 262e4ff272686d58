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

from paceline.core.checks import check_number
from paceline.core.errors import ProfileError
from paceline.planner.cost_points import MAX_COUNT, MAX_MS
from paceline.planner.estimate import Estimate

TRUST, MOST = 0.1, 1.0
"""Steps of many rows that the table's union is worth, and that what was seen is worth at most."""
GUESS = 0.01
"""The same where no table says it: no more than a beginning."""
BISECTIONS = 40
DISK = 8.0
"""By how many times weights take longer that come from disk, about. Where most experts do, reading
them is all that a step takes, whatever this is."""
DISK_TRUST, MOST_DISK = 1.0, 64.0
"""Steps that what is expected of a cache is worth, and that what was seen is worth at most."""
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
        """What ``_asdict`` made; ``ProfileError`` if it is no such thing."""
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
        first, trust = (1.0, TRUST) if is_measured else (cost.number / cost.per_token, GUESS)
        self._times = Estimate(first, trust, MOST)

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
        self._from_disk = Estimate(from_disk, DISK_TRUST, MOST_DISK) if from_disk else None
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
