"""How sure a ratio of two arms is: the percentile bootstrap over pairs (Efron, 1979).

Both arms keep the same prompts in each draw, so that what makes a prompt slow in both does not
widen the interval.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
TAILS = (0.025, 0.975)


def ratio_interval(
    pairs: NDArray[np.float64], statistic: Callable[..., Any]
) -> tuple[float, float]:
    """The middle 95 % of one arm's statistic over the other's.

    Args:
        pairs: ``[2, pairs]``, the same prompt or block in the same place.
        statistic: such as :func:`numpy.median`; draws in which the second arm's is 0 are left out.
    """
    count = pairs.shape[1]
    drawn = np.random.default_rng(0).integers(count, size=(DRAWS, count))
    above, below = statistic(pairs[:, drawn], axis=2)  # [draws] each
    usable = below > 0
    low, high = np.quantile(above[usable] / below[usable], TAILS)
    return float(low), float(high)
