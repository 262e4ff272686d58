"""What the target's noise says of the tokens that it may sample. Knows no drafts.

A sampled token is the one with the highest sum of logit over temperature and noise
(``docs/losslessness.md``), and the noise of every place is known before the target is run. Where a
token's probability was estimated from texts, the logit is known but roughly, so that the noise only
makes a token likelier or less likely: by ``exp(weight * noise)``, of which tokens that are no
candidates have the mean. The weight rises with the temperature, since the noise is weighed
against logits over temperature. ``csrc/drafts/noise.cpp`` is the same in C++, to the last bit.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.request.request import Request
from paceline.sampling.sampler import SEED_MASK, philox

WEIGHT = 0.6
"""At temperature 1."""
MOST_WEIGHT = 0.75
"""The factor has no mean at 1."""


class TargetNoise:
    """See the module's docstring.

    Args:
        seed: of the request, 64 bits.
        sample: its sample index.
        weight: of the noise; 0 where nothing is sampled.
        mean: of the factor.
    """

    def __init__(
        self, seed: int = 0, sample: int = 0, weight: float = 0.0, mean: float = 1.0
    ) -> None:
        self._seed, self._sample = seed, sample
        self._weight, self._mean = weight, mean

    def factor(self, position: int, token: int) -> float:
        """How much likelier the noise makes a token at a place of prompt and output together."""
        counter = (position, token // 4, self._sample, 0)
        words = philox(*(np.array([value], np.uint64) for value in (self._seed, *counter)))
        u = (int(words[token % 4][0]) + 0.5) * 2.0**-32
        return math.pow(-math.log(u), -self._weight)

    def weighed(self, position: int, probs: dict[int, float]) -> dict[int, float]:
        """Probabilities of candidates, which sum to at most 1, in view of the noise."""
        if self._weight == 0.0 or not probs:
            return probs
        rest, total, weighed = 1.0, 0.0, dict[int, float]()
        for token, prob in probs.items():
            rest -= prob
            weighed[token] = prob * self.factor(position, token)
            total += weighed[token]
        total += self._mean * max(0.0, rest)
        return {token: value / total for token, value in weighed.items()}


NO_NOISE = TargetNoise()
"""Of a request whose tokens are not sampled."""


def noise_of(request: Request) -> tuple[int, int, float, float]:
    """The arguments of a request's :class:`TargetNoise`."""
    params = request.params
    if params.is_greedy:
        return 0, 0, 0.0, 1.0
    weight = min(MOST_WEIGHT, WEIGHT * params.temperature)
    return request.seed & SEED_MASK, request.sample_index, weight, math.gamma(1.0 - weight)
