"""What a step of a mixture reads: how many experts its rows choose together, and what one costs.

    T(step) = table(step) + price x (experts that it reads - those that the table's step read)

An expert is counted once per layer, whichever and however many rows choose it, because its weights
are read once for all of them. So a draft node costs what it adds to the union. Owns the union's
growth with rows and the price, both learnt; knows neither the table nor whose the rows are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, log
from typing import NamedTuple

from paceline.checks import check_number
from paceline.errors import ProfileError
from paceline.policy.cost_points import MAX_COUNT, MAX_MS
from paceline.policy.estimate import Estimate

TRUST, MOST = 0.1, 1.0
"""Steps of many rows that the table's union is worth, and that what was seen is worth at most."""
MOST_APART = 2.0
"""Largest exponent of the union."""
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

    ``n`` rows that chose by themselves would leave ``(1 - per_token / number) ** n`` of all unread.
    What a table's step read is as much as some ``n`` of them read; the rows of the text at hand
    read as much as ``n ** exponent``, where the exponent is below 1 if they are more alike.
    """

    def __init__(self, cost: ExpertCost) -> None:
        self._all = cost.layers * cost.number
        self._left = 1.0 - cost.per_token / cost.number
        self._exponent = Estimate(1.0, TRUST, MOST)

    def alone(self, experts: float) -> float:
        """Rows that read so many experts if they choose by themselves; at least one."""
        unread = 1.0 - experts / self._all
        return max(1.0, log(unread) / log(self._left)) if unread > 0.0 and self._left else inf

    def read(self, alone: Iterable[float]) -> list[float]:
        """Experts that steps are expected to read, of all layers together.

        Args:
            alone: of each step, rows that choose by themselves and read what its table says.
        """
        exponent, whole, left = self._exponent.mean(), self._all, self._left
        return [whole - whole * left**rows**exponent for rows in alone]

    def learn(self, alone: float, experts: int) -> None:
        """Take in how many experts such a step has read."""
        span, rows = log(alone), self.alone(experts)
        if 0.0 < span < inf > rows:
            # Of few rows the exponent is as uncertain as their logarithm is small, and of a union
            # that is nearly everything there is little to tell.
            weight = (1.0 - experts / self._all) * span * span / (1.0 + span * span)
            self._exponent.learn(min(MOST_APART, log(rows) / span), weight=weight)


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
