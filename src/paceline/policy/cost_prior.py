"""The cost curve that is assumed where nothing was measured. Owns its numbers and their source."""

from __future__ import annotations

from functools import cache

from paceline.policy.cost_points import CostPoint
from paceline.policy.cost_table import CostTable

_RATIOS = {1: 1.0, 2: 1.12, 4: 1.25, 8: 1.53, 16: 2.65, 32: 4.77}
"""Time of a forward of so many rows over that of one row.

The geometric mean of two measured curves of int8 forwards of a 0.5 B model with two threads: on a
processor with AVX2 (1.15, 1.35, 1.87, 4.14, 7.11) and on one with AVX-512 VNNI (1.1, 1.15, 1.25,
1.7, 3.2). Reading the weights bounds the narrow steps, arithmetic the wide ones: beyond the last
point every row costs the same.
"""


@cache
def prior_table() -> CostTable:
    """In plain steps; every row sampled or not, at every context, of any number of requests."""
    points = [CostPoint(1, 0, width, width, ratio) for width, ratio in _RATIOS.items()]
    return CostTable("assumed: nothing was measured", points, is_relative=True)
