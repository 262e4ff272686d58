"""The planner's one way to learn a number: a mean that is certain as far as it was seen lately.

Knows neither what it estimates nor in what unit age is counted.
"""

from __future__ import annotations

from math import exp, inf


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

    def __init__(self, prior: float, trust: float, most: float, memory: float = inf) -> None:
        self._prior, self._trust, self._most, self._memory = prior, trust, most, memory
        self._seen = self._weight = self._at = 0.0

    def mean(self, now: float = 0.0) -> float:
        # As in _left, without the call: a step asks it of every width.
        weight = self._weight and self._weight * exp((self._at - now) / self._memory)
        return (self._trust * self._prior + weight * self._seen) / (self._trust + weight)

    def variance(self, now: float = 0.0) -> float:
        return 1.0 / (self._trust + self._left(now))

    def learn(self, value: float, now: float = 0.0, weight: float = 1.0) -> None:
        """Take in an observation that is worth so many."""
        self._weight, self._at = self._left(now) + weight, now
        self._seen += weight / self._weight * (value - self._seen)
        self._weight = min(self._weight, self._most)

    def forget(self, part: float) -> None:
        """Let what was seen count for no more than such a part of what it did."""
        self._weight *= part

    def _left(self, now: float) -> float:
        return self._weight * exp((self._at - now) / self._memory) if self._weight else 0.0
