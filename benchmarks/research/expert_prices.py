"""What it is worth to price the experts of a mixture, on simulated machines.

Each request's text has some of the experts of each layer, few or all, from which its rows choose at
random; some texts change every 30 steps. A step takes a time per row, one per expert that it
reads, and noise. The planner with a profile or without is compared with the same planner of a cost
model that knows rows alone, which learns what they cost as that of a dense model does.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import exp, sqrt
from statistics import mean, stdev
from typing import Any

from harness import ROOT, arguments, note
from report import Report, Row, grid, markdown

from paceline.planner.cost import CostModel
from paceline.planner.cost_aware import CostAwarePlanner
from paceline.planner.cost_points import CostPoint
from paceline.planner.cost_table import CostTable
from paceline.planner.drafting_cost import DraftTime
from paceline.planner.experts import ExpertCost

sys.path.insert(0, str(ROOT))
from tests.planner.machine import LOOKUP, Machine, request

EXPERTS = ExpertCost(layers=4, number=64, per_token=4, ms=0.25)
PLAIN_MS, ROW_MS = 4.0, 0.1
NOISE = 0.03
ASSUMED = EXPERTS._replace(ms=EXPERTS.ms / (PLAIN_MS + EXPERTS.ms * EXPERTS.least))
TEXTS = {
    "all alike": (4,),
    "some alike": (16,),
    "none alike": (64,),
    "4 and 64 in turn": (4, 64),
    "8 and 32 in turn": (8, 32),
}
"""By name, experts of each layer that a text has, one text after another."""
STEPS, CHANGE = 300, 30
RIGHTS = (0.5, 0.7, 0.9)
PROFILED_TEXT = 16


def experts_read(draw: random.Random, rows: int, requests: int, pool: int) -> int:
    total = 0
    for _ in range(EXPERTS.layers):
        seen: set[int] = set()
        for index in range(requests):
            own = draw.sample(range(EXPERTS.number), pool)
            for _ in range((rows * (index + 1)) // requests - rows * index // requests):
                seen.update(draw.sample(own, EXPERTS.per_token))
        total += len(seen)
    return total


class Times(Sequence[float]):
    """What steps of 1, 2, 3, ... rows take besides their experts."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def __len__(self) -> int:
        return 600

    def __getitem__(self, at: Any) -> Any:
        if at >= len(self):
            raise IndexError(at)
        return (PLAIN_MS + ROW_MS * (at + 1)) * exp(self._draw.gauss(0.0, NOISE))


@cache
def profile(is_priced: bool) -> CostTable:
    """What ``paceline profile`` finds there, on a text of its own."""
    draw, points = random.Random(0), []
    steps = [(1, w) for w in (*range(1, 34), 48, 64, 128)]
    for requests, width in [*steps, *product((2, 4, 8), (1, 4))]:
        read = experts_read(draw, requests * width, requests, PROFILED_TEXT)
        ms = PLAIN_MS + ROW_MS * requests * width + EXPERTS.ms * read
        points.append(CostPoint(requests, 0, width, width, ms, 0.0, read))
    return CostTable("mixture", points, experts=EXPERTS if is_priced else None)


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    right: float
    requests: int
    has_profile: bool


def speed_up(cell: Cell, is_priced: bool, seed: int) -> float:
    draw, pools = random.Random(seed), TEXTS[cell.text]
    pool = pools[0]
    machine = Machine(
        Times(seed),
        (LOOKUP,),
        DraftTime(0.02),
        seed=seed,
        table=profile(False),  # of a planner that is replaced
        read=lambda rows, requests: experts_read(draw, rows, requests, pool),
        expert_ms=EXPERTS.ms,
    )
    believed = profile(is_priced) if cell.has_profile else None
    machine.planner = CostAwarePlanner(CostModel(believed, experts=ASSUMED if is_priced else None))
    machine.planner.set_sources(machine.sources)
    requests = [request(index) for index in range(cell.requests)]
    for index in range(STEPS // CHANGE):
        pool = pools[index % len(pools)]
        machine.run(requests, lambda _: cell.right, CHANGE)
    return machine.speed_up


def cells() -> Iterator[Cell]:
    for requests, has, text, right in product((1, 4), (True, False), TEXTS, RIGHTS):
        yield Cell(text, right, requests, has)


def row(cell: Cell, seeds: int) -> dict[str, Any]:
    pairs = [(speed_up(cell, True, seed), speed_up(cell, False, seed)) for seed in range(seeds)]
    ratios = [priced / unpriced for priced, unpriced in pairs]
    return {
        "text": cell.text,
        "right": cell.right,
        "requests": cell.requests,
        "profile": "yes" if cell.has_profile else "no",
        "priced": mean(priced for priced, _ in pairs),
        "unpriced": mean(unpriced for _, unpriced in pairs),
        "ratio": mean(ratios),
        "error": stdev(ratios) / sqrt(seeds) if seeds > 1 else 0.0,
    }


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.sized("--seeds", 6, 1, "of each cell")
    return parser.parse_args(argv)


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        *(
            ("text", "text"),
            ("right", "right", 1),
            ("requests", "requests"),
            ("profile", "profile"),
        ),
        *(("priced", "priced", 2), ("unpriced", "unpriced", 2), ("ratio", "ratio", 3)),
        ("error", "error", 3),
    )
    return [markdown(*grid(results, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    report = Report("expert_prices", {"seeds": options.seeds, "steps": STEPS})
    for cell in cells():
        report.results.append(row(cell, options.seeds))
        note(f"{cell}: {report.results[-1]['ratio']:.3f}")
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
