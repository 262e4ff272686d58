"""Whether one arithmetic diverges more than another on the same text, with a confidence bound.

Knows scores of windows alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from paceline.workbench.quality import Quality

DRAWS = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Excess:
    """By how much the mean KL divergence of one row exceeds that of another.

    Attributes:
        difference: in nats per token; negative where the first row diverges less.
        upper: what it does not exceed with 95 % confidence.
        relative, relative_upper: both over the other row's mean KL divergence; None where that
            is zero.
    """

    difference: float
    upper: float
    relative: float | None
    relative_upper: float | None

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


def excess(own: Quality, other: Quality, draws: int = DRAWS, seed: int = 0) -> Excess:
    """Compare two rows that scored the same windows.

    A token's divergence depends on the text around it, so windows and not tokens are the units that
    chance draws: a block bootstrap. Each draw takes as many windows as there are, with replacement,
    the same ones for both rows, and divides the sum of the differences by the number of tokens. The
    bound is the 95th percentile of the draws: one-sided, and the pairing takes out that some
    windows are harder for every arithmetic. With few windows it is too narrow; text of a kind that
    no window has is not covered.
    """
    assert len(own.windows) == len(other.windows)
    pairs = list(zip(own.windows, other.windows, strict=True))
    gaps = np.array([float((a.kl - b.kl).sum()) for a, b in pairs])
    tokens = np.array([len(a.kl) for a, _ in pairs])
    drawn = np.random.default_rng(seed).integers(0, len(pairs), (draws, len(pairs)))
    means = gaps[drawn].sum(axis=1) / tokens[drawn].sum(axis=1)
    difference, upper = float(gaps.sum() / tokens.sum()), float(np.quantile(means, CONFIDENCE))
    base = other.mean_kl
    if base <= 0.0:
        return Excess(difference, upper, None, None)
    return Excess(difference, upper, difference / base, upper / base)
