"""Which cells ``never_slower.py`` measures, and how large they are. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass

from workloads import DESCRIPTIONS

Cell = tuple[str, int, float]
"""Workload, requests in a batch, temperature."""
HOSTILE = 1.3

# These three were chosen before anything was run, and are not to be changed after: every workload,
# several numbers of requests, greedy and sampled. The sonnet and random cells are those of public
# reports.
PRE_REGISTERED: tuple[Cell, ...] = (
    ("code", 1, 0.0),
    ("mt_bench", 4, 0.8),
    ("spec_bench", 8, 0.0),
    ("gsm8k", 1, 0.8),
    ("sonnet", 1, 0.0),
    ("sonnet", 4, 0.0),
    ("random", 1, 0.0),
    ("random", 4, 0.0),
    ("edit", 1, 0.0),
    ("prose", 16, 0.8),
    ("hostile", 1, HOSTILE),
    ("hostile", 8, HOSTILE),
    ("json", 4, 0.8),
    ("mixture", 8, 0.0),
)
QUICK: tuple[Cell, ...] = (
    ("code", 1, 0.0),
    ("sonnet", 4, 0.0),
    ("hostile", 1, HOSTILE),
    ("mixture", 8, 0.0),
)
INFLATED: tuple[Cell, ...] = (
    ("code", 1, 0.0),
    ("prose", 1, 0.0),
    ("edit", 1, 0.0),
    ("mixture", 4, 0.0),
    ("hostile", 1, HOSTILE),
)
RUNS = {
    ("embedded", False): "never_slower",
    ("embedded", True): "never_slower_full",
    ("inflated", False): "never_slower_inflated",
    ("inflated", True): "never_slower_inflated_full",
}
"""Names of the results, by pair of models and whether the whole grid was run."""
CONCURRENCY = (1, 2, 4, 8, 16, 32)
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, slots=True)
class Size:
    """How large a cell is.

    Attributes:
        max_tokens: of each request; the sonnet and random workloads have their own.
        longest: tokens of a prompt; of a longer one the end is taken.
        requests: that a cell runs in each repeat, in as many groups as that makes.
        groups: at least, and at most.
        repeats: of each group.
        minutes: for all cells together; what does not fit is cut from the repeats. None: no limit.
    """

    max_tokens: int
    longest: int
    requests: int
    groups: tuple[int, int]
    repeats: int
    minutes: float | None


SIZES = {
    "embedded": Size(96, 550, 24, (2, 8), 3, 20.0),
    "inflated": Size(48, 160, 4, (1, 2), 3, 15.0),
}
QUICK_SIZE = Size(64, 550, 4, (2, 3), 2, 2.0)


def full_grid() -> list[Cell]:
    return [
        (workload, requests, temperature)
        for workload in DESCRIPTIONS
        for requests in CONCURRENCY
        for temperature in ((HOSTILE,) if workload == "hostile" else TEMPERATURES)
        if workload != "mixture" or requests > 1
    ]
