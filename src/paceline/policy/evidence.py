"""What a proposer's estimate is evidence of: the cell it falls into, and its log-odds at first.

A *cell* is an origin, a range of depths and a bucket of the proposer's estimate, which stands for
what the proposer went by: a match's length and support, or the margin of a draft model. Owns the
cells and the priors; learns nothing itself.
"""

from __future__ import annotations

from functools import cache
from math import log

STEPS = 256
"""Estimates are told apart to one part in so many."""
EDGES = (-3.0, -2.0, -1.25, -0.6, 0.0, 0.6, 1.25, 2.0, 2.75, 3.5, 4.5)
"""Log-odds of a proposer's estimate between its buckets."""
LEAST_DEPTHS = (1, 2, 3, 5, 9)
"""The least depth of each range of depths."""
MAX_DEPTH = LEAST_DEPTHS[-1]
"""Depths from here on are one."""

# Slope and intercept, per range of depths, of the log-odds of acceptance over those of the
# proposer's estimate. benchmarks/research/calibration.py fits them to a half of its prompts: code,
# prose and edits, greedy and at 0.8 and 1.3, the embedded models. No draft of the first two
# reached depth 9. Those of `suffix` come from replays of 16 prompts of each public set; those of
# `ngram_model` from replays of 14 of each and of JSON, greedy and at 0.8, with a model of order 4
# that had learnt the answers to others. Those of `self` are of half and three quarters of the
# layers and of all of them in 4 bits, on nine public prompts, greedy and at 0.8. Those of
# `parallel_draft` are of chains of 8 on 36 public prompts, greedy and at 0.8 and 1.3; too few of
# them came to depth 5 to tell it from depth 3.
PRIORS = {
    "prompt_lookup": ((0.89, 0.14), (0.94, 0.32), (0.89, 0.63), (0.80, 1.01), (0.80, 1.01)),
    "draft_model": ((1.23, 0.22), (1.30, 0.51), (1.39, 0.71), (1.71, 0.67), (1.71, 0.67)),
    "ngram_model": ((0.86, -0.55), (0.88, -0.49), (0.88, -0.35), (1.03, -0.09), (1.06, 0.05)),
    "parallel_draft": ((1.14, 0.35), (0.70, -1.11), (1.14, -0.90), (1.14, -0.90), (1.14, -0.90)),
    "self": ((0.91, -0.12), (1.28, 0.17), (1.18, 0.37), (1.05, 1.09), (1.05, 1.09)),
    "suffix": ((0.97, -0.37), (1.00, -0.34), (0.89, -0.18), (0.85, 0.19), (1.21, 0.06)),
}
AS_ESTIMATED = ((1.0, 0.0),) * len(LEAST_DEPTHS)
"""The prior of an unknown proposer."""

CELLS_PER_ORIGIN = 1 << 7
ORIGIN_SHIFT = 7
"""A cell without so many of its bits is the number of its origin."""
_DEPTH_SHIFT = 4

Row = list[tuple[int, float]]
"""By ``int(STEPS * estimate)``: the cell, and the log-odds of acceptance by the prior."""


def depth_range(depth: int) -> int:
    """Index of the range that a depth lies in."""
    return max(0, sum(depth >= least for least in LEAST_DEPTHS) - 1)


def bucket_of(logit: float) -> int:
    """Index of the bucket that log-odds of a proposer's estimate lie in."""
    return sum(logit >= edge for edge in EDGES)


@cache
def rows_of(origin: str, number: int) -> list[Row]:
    """A row per depth, from 0 to :data:`MAX_DEPTH`, for an origin and the number that it has."""
    priors = PRIORS.get(origin, AS_ESTIMATED)
    # An estimate stands for its whole step; the last one, a certainty, is as sure as its neighbour.
    middles = [(min(at, STEPS - 1) + 0.5) / STEPS for at in range(STEPS + 1)]
    logits = [log(middle / (1.0 - middle)) for middle in middles]
    rows = []
    for place, (slope, intercept) in enumerate(priors):
        first = number << ORIGIN_SHIFT | place << _DEPTH_SHIFT
        rows.append([(first | bucket_of(x), slope * x + intercept) for x in logits])
    return [rows[depth_range(depth)] for depth in range(MAX_DEPTH + 1)]


def logits_of(rows: list[Row]) -> list[float]:
    """By cell of one origin: the mean log-odds by the prior of the estimates that fall into it."""
    found: dict[int, list[float]] = {}
    for row in rows:
        for cell, logit in row:
            found.setdefault(cell % CELLS_PER_ORIGIN, []).append(logit)
    empty = [0.0]
    means = (found.get(cell, empty) for cell in range(CELLS_PER_ORIGIN))
    return [sum(logits) / len(logits) for logits in means]
