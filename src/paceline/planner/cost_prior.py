"""The cost curve that is assumed where nothing was measured. Owns its numbers and their source."""

from __future__ import annotations

from functools import cache
from statistics import geometric_mean

from paceline.planner.cost_points import CostPoint
from paceline.planner.cost_table import CostTable
from paceline.planner.experts import DISK, ExpertCost

_WIDTHS = (1, 2, 4, 8, 16, 32)
_RATIOS = {
    "native amx": (1.0, 1.05, 1.16, 1.30, 1.58, 2.26),
    "native avx512vnni": (1.0, 1.05, 1.18, 1.40, 2.28, 4.17),
    "native avx2": (1.0, 1.04, 1.15, 1.87, 4.14, 7.11),
}
"""Time of a forward of so many rows over that of one row, by the operations that compute it.

Medians with two threads. With AVX-512 VNNI the geometric mean over GGUF files of four models of
135 million to 1.5 billion parameters in Q8_0, Q4_K_M and Q4_0 on a Xeon (``benchmarks/peers.py``),
two rows counted as more than one. The others are of int8 forwards of a model of half a billion:
with AMX on a Xeon (the steps of ``paceline profile``), with AVX2 on AMD Zen 3 at a context of 64,
of a run that a later one replaced in the saved results. Reading the weights bounds the narrow
steps, arithmetic the wide ones: beyond the last point every row costs the same.
"""


_WIDER = (64, 128, 256)
"""Widths that matter where reading takes longer than what the widths before them compute."""


def prior_table(
    ops: str = "", experts: ExpertCost | None = None, streamed: float = 0.0
) -> CostTable:
    """In plain steps; every row sampled or not, at every context, of any number of requests.

    Args:
        ops: name of the model's operations; others are taken to be between those that are known.
        experts: of a mixture, which costs as much as a dense model where all rows choose alike.
        streamed: share of the weights that every step reads from disk while it computes.
    """
    return _assumed(ops, experts, streamed)


@cache
def _assumed(ops: str, experts: ExpertCost | None, streamed: float) -> CostTable:
    known = [_RATIOS[ops]] if ops in _RATIOS else list(_RATIOS.values())
    times = dict(zip(_WIDTHS, map(geometric_mean, zip(*known, strict=True)), strict=True))
    each, last = (times[32] - times[16]) / 16, times[32]
    times |= {width: last + each * (width - 32) for width in _WIDER if streamed}
    reading = max(1.0, DISK * streamed)  # in which memory would be read so many times
    read = experts.least if experts else 0
    points = [
        CostPoint(1, 0, width, width, max(1.0, ms / reading), experts=read)
        for width, ms in times.items()
    ]
    name = "assumed: nothing was measured"
    return CostTable(name, points, is_relative=True, experts=experts)
