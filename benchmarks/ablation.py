"""What each mechanism of the planner brings: it is switched off, one at a time, and replayed.

What is measured on is :mod:`ablation_grid`'s, how mechanisms are switched off
:mod:`ablation_switches`'s. With ``--keep FILE`` figures are kept as they come, and those that are
there already are not computed again, so that a long run can be done in pieces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ablation_grid import run_replays, run_scenes
from ablation_report import PLAIN, WHOLE, row, summary, tables
from ablation_switches import PLACEBOS, SWITCHES, switched_off
from harness import arguments, names, note
from report import Report

ALL = {**SWITCHES, **PLACEBOS}


def measure(name: str) -> dict[str, list[float]]:
    """Every cell with one mechanism switched off: its speed, and that of its slowest request."""
    found = {}
    for run in (run_replays, run_scenes):
        if name in ALL:
            with switched_off(ALL[name]):
                figures = run(False)
        else:
            figures = run(name == PLAIN)
        found |= {cell: [each.speed, each.slowest] for cell, each in figures.items()}
    return found


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--mechanisms", type=names, default=list(ALL))
    parser.add_argument("--keep", type=Path, help="a file of figures, read and added to")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    kept: dict[str, dict[str, list[float]]] = {}
    if options.keep and options.keep.exists():
        kept = json.loads(options.keep.read_text())
    for name in (PLAIN, WHOLE, *options.mechanisms):
        if name not in kept:
            note(f"without {name}")
            kept[name] = measure(name)
            if options.keep:
                options.keep.write_text(json.dumps(kept))
    report = Report("ablation", {"whole": summary(kept), "cells": list(kept[WHOLE])})
    report.results += [row(name, ALL[name], kept) for name in options.mechanisms]
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
