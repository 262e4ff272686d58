"""Curves of straight lines between points: one value of one curve, or many at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Curve = Sequence[tuple[float, float]]
"""Points (x, y) with ascending x."""


def on_curve(curve: Curve, x: float) -> float:
    """A curve's value: linear between its points, constant before the first.

    Beyond the last point the last slope goes on, unless it falls: more work is not free.
    """
    at = bisect_left(curve, (x, -inf))
    if at < len(curve) and (at == 0 or curve[at][0] == x):
        return curve[at][1]
    if len(curve) == 1:
        return curve[0][1]
    (x0, y0), (x1, y1) = curve[at - 1 : at + 1] if at < len(curve) else curve[-2:]
    slope = (y1 - y0) / (x1 - x0)
    return y0 + slope * (x - x0) if at < len(curve) else y1 + max(0.0, slope) * (x - x1)


def means(values: Mapping[int, Sequence[float]]) -> Curve:
    """The curve through the mean of what there is at each place."""
    return [(x, sum(ys) / len(ys)) for x, ys in sorted(values.items())]


def arrays(curve: Curve) -> tuple[Floats, Floats]:
    """A curve as :func:`on_curve_at` takes it."""
    x, y = np.array(curve, dtype=np.float64).T
    return x, y


def on_curve_at(curve: tuple[Floats, Floats], xs: Floats) -> Floats:
    """:func:`on_curve` at many ascending places at once."""
    x, y = curve
    values: Floats = np.interp(xs, x, y)
    if xs[-1] > x[-1] and len(x) > 1:
        slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
        values = values + slope * np.maximum(0.0, xs - x[-1])
    return values
