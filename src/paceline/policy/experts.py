"""What a step of a mixture reads: how many experts its rows choose together, and what one costs.

    T(step) = table(step) + price x (experts that it reads - those that the table's step read)

An expert is counted once per layer, whichever and however many rows choose it, because its weights
are read once for all of them. So a draft node costs what it adds to the union. Owns the union's
growth with rows and the price, both learnt; knows neither the table nor whose the rows are.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import NamedTuple

from paceline.checks import check_number
from paceline.errors import ProfileError
from paceline.policy.cost_points import MAX_COUNT, MAX_MS
from paceline.policy.estimate import Estimate

TRUST, MOST = 0.1, 1.0
"""Steps of many rows that the belief in rows which choose by themselves is worth, and that what was
seen is worth at most."""
MAX_VISITS = 6.0
"""The same of the price, in steps whose experts alone made their time."""


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

    Rows that chose by themselves would leave ``(1 - per_token / number) ** rows`` of all unread.
    Rows of one text choose alike, so that ``n`` of one request read as many as ``n ** along`` that
    choose by themselves, and the texts of ``r`` requests as ``r ** across``. Both exponents are 0
    to 1: the union never shrinks with rows, and each further row adds less to it.
    """

    def __init__(self, cost: ExpertCost) -> None:
        self._all = cost.layers * cost.number
        self._left = 1.0 - cost.per_token / cost.number
        self._along, self._across = Estimate(1.0, TRUST, MOST), Estimate(1.0, TRUST, MOST)

    def read(self, rows: int, requests: int) -> float:
        """Experts that so many rows are expected to read, of all layers together."""
        return self.growth(rows, requests, 0)[0]

    def growth(self, rows: int, requests: int, count: int) -> list[float]:
        """:meth:`read` of ``rows`` to ``rows + count``, ``[count + 1]``."""
        along, whole, left = self._along.mean(), self._all, self._left
        texts = requests ** self._across.mean()
        return [
            whole - whole * left ** (texts * (n / requests) ** along) if n else 0.0
            for n in range(rows, rows + count + 1)
        ]

    def learn(self, rows: int, requests: int, experts: int) -> None:
        """Take in how many experts a step has read."""
        unread = 1.0 - experts / self._all
        if not 0.0 < unread < 1.0 or not self._left:
            return  # where all are read, any further rows would have read as many
        alone = log(log(unread) / log(self._left))
        each, texts = log(rows / requests), log(requests)
        exponent, span = (self._along, each) if each else (self._across, texts)
        if span:
            if each:
                alone -= texts * self._across.mean()
            # Of few rows the exponent is as uncertain as their logarithm is small, and of a union
            # that is nearly everything there is little to tell.
            weight = unread * span * span / (1.0 + span * span)
            exponent.learn(min(1.0, max(0.0, alone / span)), weight=weight)


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
