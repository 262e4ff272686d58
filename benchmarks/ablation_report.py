"""From the figures of ``ablation.py`` to what each mechanism brings. Replays nothing.

One cell depends on accidents: a draft more or less in its beginning, and everything is learnt
anew. So the best and the worst are those of groups, the means over all workloads on one machine at
one batch size and temperature, or over the seeds of one simulated machine; and placebos show what
is still chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ablation_switches import SWITCHES, Switch
from never_slower_report import NOT_SLOWER, geometric_mean
from report import table

PLAIN, WHOLE = "plain decoding", "nothing"
KINDS = ("replayed", "simulated")
Kept = Mapping[str, Mapping[str, Sequence[float]]]
"""By what is switched off and cell: tokens per millisecond, of all and of the slowest request."""


def cells_of(kind: str, kept: Kept) -> list[str]:
    return [cell for cell in kept[WHOLE] if cell.startswith("simulated") == (kind == "simulated")]


def group_of(cell: str) -> str:
    """Its machine, batch size and temperature; of a simulated one all but the seed."""
    place, _, label = cell.partition(": ")
    if place == "simulated":
        return label.rpartition(", seed")[0]
    _, requests, temperature = label.split(", ")
    return f"{place}, {requests} at {temperature}"


def grouped(gains: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for cell, gain in gains.items():
        found.setdefault(group_of(cell), []).append(gain)
    return {group: geometric_mean(each) for group, each in found.items()}


def row(name: str, switch: Switch, kept: Kept) -> dict[str, Any]:
    """How many times as fast the planner is with a mechanism as without it."""
    found: dict[str, Any] = {"mechanism": name, "lines": switch.lines}
    found["constants"] = switch.constants
    for kind in KINDS:
        cells = cells_of(kind, kept)
        speed, slowest = (
            {cell: kept[WHOLE][cell][at] / kept[name][cell][at] for cell in cells} for at in (0, 1)
        )
        groups = grouped(speed)
        best, worst = max(groups, key=groups.__getitem__), min(groups, key=groups.__getitem__)
        found[kind] = {
            "mean": geometric_mean(list(speed.values())),
            "best": groups[best],
            "best_group": best,
            "worst": groups[worst],
            "worst_group": worst,
            "below": below(kept, name, cells) - below(kept, WHOLE, cells),
            "slowest": geometric_mean(list(slowest.values())),
        }
    whole, without = kept[WHOLE], kept[name]
    found["gains"] = [round(whole[cell][0] / without[cell][0], 4) for cell in whole]
    return found


def below(kept: Kept, name: str, cells: Iterable[str]) -> int:
    """Cells in which it is slower than plain decoding."""
    return sum(kept[name][cell][0] < NOT_SLOWER * kept[PLAIN][cell][0] for cell in cells)


def summary(kept: Kept) -> dict[str, Any]:
    """The whole planner over plain decoding."""
    found = {}
    for kind in KINDS:
        cells = cells_of(kind, kept)
        ratios = [kept[WHOLE][cell][0] / kept[PLAIN][cell][0] for cell in cells]
        found[kind] = {
            "cells": len(cells),
            "mean": geometric_mean(ratios),
            "worst": min(ratios),
            "below": below(kept, WHOLE, cells),
            "slowest": fmean(kept[WHOLE][c][1] / kept[PLAIN][c][1] for c in cells),
        }
    return found


def percent(gain: float) -> str:
    return f"{(gain - 1) * 100:+.1f}"


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    headers = ["mechanism", "lines", "const.", "replayed %", "best %", "worst %", "below"]
    headers += ["slowest %", "simulated %", "best %", "where", "worst %", "now"]
    lines = []
    for each in rows:
        real, made = (each[kind] for kind in KINDS)
        line = [each["mechanism"], each["lines"], each["constants"], percent(real["mean"])]
        line += [percent(real["best"]), percent(real["worst"]), f"{real['below']:+d}"]
        line += [percent(real["slowest"]), percent(made["mean"]), percent(made["best"])]
        is_there = each["mechanism"] in SWITCHES or not each["lines"]
        where = made["best_group"] if made["best"] >= 1.005 else "-"
        lines.append([*line, where, percent(made["worst"]), "" if is_there else "removed"])
    return [table(headers, lines)]
