"""How likely draft nodes are before anything was learnt: by proposer, its own estimate, and depth.

Owns the priors; learns nothing itself.
"""

from __future__ import annotations

from functools import cache
from math import log

STEPS = 256
"""Estimates are rounded to multiples of 1 / STEPS."""
LEAST_DEPTHS = (1, 2, 3, 5, 9)
"""The least depth of each range of depths."""
# Slope and intercept, per range of depths, of the log-odds of acceptance over those of the
# proposer's estimate: logistic regressions on a half of the prompts (code, prose and edits, greedy
# and at 0.8 and 1.3, the embedded models); the other half is in `calibration.json` of the results.
# No draft of the first two reached depth 9. Those of `suffix` come from replays of 16 prompts of
# each public set; those of `ngram_model` from replays of 14 of each and of JSON, greedy and at 0.8,
# with a model of order 4 that had learnt the answers to others, halfway to those of SmolLM2 with
# its own n-gram model, on 28 public prompts, greedy and at 0.8. Those of `self` are of half and
# three quarters of the layers and of all of them in 4 bits, on nine public prompts, greedy and at
# 0.8. Those of `parallel_draft` are of chains of 8 on 36 public prompts, greedy and at 0.8 and 1.3;
# too few of them came to depth 5 to tell it from depth 3. Those of `eagle3` are of the head that
# the commands in benchmarks/data/README.md train, on 60 prompts that it was not trained on, greedy
# and at 0.8.
PRIORS = {
    "prompt_lookup": ((0.89, 0.14), (0.94, 0.32), (0.89, 0.63), (0.80, 1.01), (0.80, 1.01)),
    "draft_model": ((1.23, 0.22), (1.30, 0.51), (1.39, 0.71), (1.71, 0.67), (1.71, 0.67)),
    "eagle3": ((0.82, -0.63), (0.87, -0.52), (0.98, -0.47), (0.95, -0.61), (0.95, -0.61)),
    "ngram_model": ((0.85, -0.53), (0.88, -0.54), (0.78, -0.48), (0.97, -0.28), (1.00, -0.20)),
    "parallel_draft": ((1.14, 0.35), (0.70, -1.11), (1.14, -0.90), (1.14, -0.90), (1.14, -0.90)),
    "self": ((0.91, -0.12), (1.28, 0.17), (1.18, 0.37), (1.05, 1.09), (1.05, 1.09)),
    "suffix": ((0.97, -0.37), (1.00, -0.34), (0.89, -0.18), (0.85, 0.19), (1.21, 0.06)),
}


def depth_range(depth: int) -> int:
    """Index of the range that a depth lies in."""
    return max(0, sum(depth >= least for least in LEAST_DEPTHS) - 1)


@cache
def logits_of(origin: str) -> list[list[float]]:
    """Log-odds of acceptance by depth and ``int(STEPS * estimate)``. From the last depth on all
    are alike."""
    priors = PRIORS.get(origin, ((1.0, 0.0),) * len(LEAST_DEPTHS))  # or as it is estimated
    # An estimate stands for its whole step; the last one, a certainty, is as sure as its neighbour.
    middles = [(min(at, STEPS - 1) + 0.5) / STEPS for at in range(STEPS + 1)]
    logits = [log(middle / (1.0 - middle)) for middle in middles]
    rows = [[slope * x + intercept for x in logits] for slope, intercept in priors]
    return [rows[depth_range(depth)] for depth in range(LEAST_DEPTHS[-1] + 1)]
