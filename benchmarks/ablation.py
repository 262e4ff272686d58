"""What each mechanism of the planner brings: it is switched off, one at a time, and replayed.

What is measured on is :mod:`ablation_grid`'s, how mechanisms are switched off
:mod:`ablation_switches`'s. With ``--keep FILE`` figures are kept as they come, and those that are
there already are not computed again, so that a long run can be done in pieces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ablation_grid import run_replays, run_scenes
from ablation_switches import PLACEBOS, SWITCHES, switched_off
from harness import arguments, names, note
from never_slower_report import NOT_SLOWER, geometric_mean
from report import Report, table

ALL = {**SWITCHES, **PLACEBOS}
PLAIN, WHOLE = "plain decoding", "nothing"
Kept = dict[str, dict[str, list[float]]]
"""By what is switched off and cell: tokens per millisecond, of all and of the slowest request."""


def measure(name: str) -> dict[str, list[float]]:
    """Every cell with one mechanism switched off."""
    found = {}
    for run in (run_replays, run_scenes):
        if name in ALL:
            with switched_off(ALL[name]):
                figures = run(False)
        else:
            figures = run(name == PLAIN)
        found |= {cell: [each.speed, each.slowest] for cell, each in figures.items()}
    return found


# --- the report -----------------------------------------------------------------------------------


def gains(whole: Mapping[str, list[float]], without: Mapping[str, list[float]], at: int) -> Any:
    """By cell, how many times as fast the planner is with the mechanism as without it."""
    return {cell: whole[cell][at] / without[cell][at] for cell in whole}


def row(name: str, kept: Kept) -> dict[str, Any]:
    """What a mechanism brings in the mean and in its best cell, and in which it does most harm."""
    whole, switch = kept[WHOLE], ALL[name]
    speed, slowest = (gains(whole, kept[name], at) for at in (0, 1))
    found: dict[str, Any] = {"mechanism": name, "lines": switch.lines}
    found["constants"] = switch.constants
    for kind in ("replayed", "simulated"):
        own = {
            c: gain for c, gain in speed.items() if c.startswith("simulated") == (kind[0] == "s")
        }
        best, worst = max(own, key=own.__getitem__), min(own, key=own.__getitem__)
        found[kind] = {
            "mean": geometric_mean(list(own.values())),
            "error": stdev(own.values()) / len(own) ** 0.5,
            "best": own[best],
            "best_cell": best,
            "worst": own[worst],
            "worst_cell": worst,
            "below": below(kept, name, own) - below(kept, WHOLE, own),
            "slowest": geometric_mean([slowest[cell] for cell in own]),
            "slowest_best": max(slowest[cell] for cell in own),
        }
    found["gains"] = [round(gain, 4) for gain in speed.values()]
    return found


def cells_of(kind: str, kept: Kept) -> list[str]:
    return [cell for cell in kept[WHOLE] if cell.startswith("simulated") == (kind == "simulated")]


def below(kept: Kept, name: str, cells: Iterable[str]) -> int:
    """Cells in which it is slower than plain decoding."""
    return sum(kept[name][cell][0] < NOT_SLOWER * kept[PLAIN][cell][0] for cell in cells)


def percent(gain: float) -> str:
    return f"{(gain - 1) * 100:+.1f}"


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    headers = ["mechanism", "lines", "const.", "mean %", "+-", "best %", "worst %", "< plain"]
    headers += ["slowest %", "best %", "simulated %", "+-", "best %", "worst %", "< plain"]
    lines = []
    for each in rows:
        real, made = each["replayed"], each["simulated"]
        line = [each["mechanism"], each["lines"], each["constants"], percent(real["mean"])]
        line += [f"{100 * real['error']:.1f}", percent(real["best"]), percent(real["worst"])]
        line += [f"{real['below']:+d}", percent(real["slowest"]), percent(real["slowest_best"])]
        line += [percent(made["mean"]), f"{100 * made['error']:.1f}", percent(made["best"])]
        lines.append([*line, percent(made["worst"]), f"{made['below']:+d}"])
    return [table(headers, lines)]


def summary(kept: Kept) -> dict[str, float]:
    """The whole planner over plain decoding."""
    found = {}
    for kind in ("replayed", "simulated"):
        cells = cells_of(kind, kept)
        ratios = [kept[WHOLE][cell][0] / kept[PLAIN][cell][0] for cell in cells]
        found |= {f"{kind}, cells": len(cells), f"{kind}, mean": geometric_mean(ratios)}
        found |= {f"{kind}, worst": min(ratios)}
        found[f"{kind}, below"] = below(kept, WHOLE, cells)
        found[f"{kind}, slowest"] = fmean(kept[WHOLE][c][1] / kept[PLAIN][c][1] for c in cells)
    return found


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--mechanisms", type=names, default=list(ALL))
    parser.add_argument("--keep", type=Path, help="a file of figures, read and added to")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    kept: Kept = {}
    if options.keep and options.keep.exists():
        kept = json.loads(options.keep.read_text())
    for name in (PLAIN, WHOLE, *options.mechanisms):
        if name not in kept:
            note(f"without {name}")
            kept[name] = measure(name)
            if options.keep:
                options.keep.write_text(json.dumps(kept))
    report = Report("ablation", {"whole": summary(kept), "cells": list(kept[WHOLE])})
    report.results += [row(name, kept) for name in options.mechanisms]
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
