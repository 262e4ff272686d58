"""The cost curve that is assumed where nothing was measured. Owns its numbers and their source."""

from __future__ import annotations

from functools import cache
from statistics import geometric_mean

from paceline.policy.cost_points import CostPoint
from paceline.policy.cost_table import CostTable

_WIDTHS = (1, 2, 4, 8, 16, 32)
_RATIOS = {
    "native amx": (1.0, 1.05, 1.16, 1.30, 1.58, 2.26),
    "native avx512vnni": (1.0, 1.01, 1.08, 1.24, 1.51, 2.43),
    "native avx2": (1.0, 1.04, 1.15, 1.87, 4.14, 7.11),
}
"""Time of a forward of so many rows over that of one row, by the operations that compute it.

Medians of int8 forwards of a 0.5 B model with two threads. On AMD Zen 5 (``benchmarks/peers.py``)
and on a Xeon with AMX (the steps of ``paceline profile``) the geometric mean over contexts of 64
and 512, two rows counted as more than one; on AMD Zen 3 at 64, of a run that a later one replaced
in the saved results. Reading the weights bounds the narrow steps, arithmetic the wide ones: beyond
the last point every row costs the same.
"""


@cache
def prior_table(ops: str = "") -> CostTable:
    """In plain steps; every row sampled or not, at every context, of any number of requests.

    Args:
        ops: name of the model's operations; others are taken to be between those that are known.
    """
    known = [_RATIOS[ops]] if ops in _RATIOS else list(_RATIOS.values())
    points = []
    for width, ratios in zip(_WIDTHS, zip(*known, strict=True), strict=True):
        points.append(CostPoint(1, 0, width, width, geometric_mean(ratios)))
    return CostTable("assumed: nothing was measured", points, is_relative=True)
