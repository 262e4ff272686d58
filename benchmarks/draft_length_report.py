"""What ``draft_length.py`` makes of its replays and runs: summaries, targets and tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from report import Target, number, table

PLANNER = "planner"
SIMULATED, MEASURED = "simulated", "measured"
SHOWN = (*range(9), 10, 12, 14, 16, 20, 24, 28, 32)
"""Lengths that a page shows; the program prints all."""
SUMMARY = (
    "draft, simulated",
    "text",
    "plain tok/s",
    "best K",
    "tok/s",
    "speed-up",
    "accepted/drafted",
    "plain is faster from K",
    "planner tok/s",
    "speed-up",
    "of best K",
    "nodes/step",
)
Rows = Sequence[Mapping[str, Any]]
Curve = dict[int, Mapping[str, Any]]
"""Rows by the number of drafted tokens."""
Found = Mapping[tuple[str, str], tuple[Curve, Mapping[str, Any]]]
"""By draft and text: the rows of every length, and the planner's."""


def curves(results: Rows) -> Found:
    """Only of drafts and texts without a failed replay."""
    found: dict[tuple[str, str], tuple[Curve, Mapping[str, Any]]] = {}
    for key in dict.fromkeys((each["draft"], each["text"]) for each in results):
        rows = [
            each
            for each in results
            if (each["draft"], each["text"]) == key and each["kind"] == SIMULATED
        ]
        if any("error" in each for each in rows):
            continue
        lengths = {each["K"]: each for each in rows if each["K"] != PLANNER}
        (planner,) = (each for each in rows if each["K"] == PLANNER)
        found[key] = lengths, planner
    return found


def best_length(curve: Curve) -> int:
    return max(curve, key=lambda length: curve[length]["speedup"])


def crossover(curve: Curve) -> int | None:
    """The first length beyond the best one at which plain decoding is faster; None if none is."""
    best = best_length(curve)
    slower = (length for length in sorted(curve) if length > best)
    return next((length for length in slower if curve[length]["speedup"] < 1.0), None)


def targets(results: Rows) -> list[Target]:
    pairs = list(curves(results).values())
    against = [planner["speedup"] / c[best_length(c)]["speedup"] for c, planner in pairs]
    plain = [planner["speedup"] for _, planner in pairs]
    errors = [
        abs(each["speedup"] / each["simulated_speedup"] - 1)
        for each in results
        if each["kind"] == MEASURED and each["K"] and "error" not in each
    ]
    mean = exp(fmean(map(log, against))) if against else None
    found = [
        Target("planner / best K, geometric mean", mean, 1.0, "at least"),
        Target("planner / best K, worst", min(against, default=None), 0.93, "at least"),
        Target("planner / plain, worst", min(plain, default=None), 0.99, "at least"),
    ]
    if any(each["kind"] == MEASURED for each in results):
        found.append(
            Target("simulated speed-up off the measured one", max(errors, default=None), 0.07)
        )
    return found


def tables(results: Rows, shown: Collection[int] | None = None) -> list[str]:
    """Summary, tokens per second by length, and what was measured.

    Args:
        shown: lengths that get a row; None for every one that was replayed.
    """
    found = curves(results)
    printed = [summary(found), by_length(found, shown)]
    points = [each for each in results if each["kind"] == MEASURED]
    return [*printed, measured_points(points)] if points else printed


def summary(found: Found) -> str:
    lines = []
    for (draft, text), (curve, planner) in found.items():
        best = best_length(curve)
        row, cross = curve[best], crossover(curve)
        lines.append(
            [
                draft,
                text,
                number(curve[0]["tokens_per_second"], 1),
                best,
                number(row["tokens_per_second"], 1),
                number(row["speedup"]),
                f"{row['accepted_share']:.0%}" if best else "-",
                "-" if cross is None else cross,
                number(planner["tokens_per_second"], 1),
                number(planner["speedup"]),
                number(planner["speedup"] / row["speedup"]),
                number(planner["nodes_per_step"]),
            ]
        )
    return table(SUMMARY, lines)


def page_tables(results: Rows) -> list[str]:
    return tables(results, SHOWN)


def by_length(found: Found, shown: Collection[int] | None) -> str:
    """Tokens per second by length, a column per draft and text."""
    lengths = sorted({length for curve, _ in found.values() for length in curve})
    lines = [
        [
            f"K = {length}",
            *(number(curve[length]["tokens_per_second"], 1) for curve, _ in found.values()),
        ]
        for length in lengths
        if shown is None or length in shown
    ]
    planner = [number(row["tokens_per_second"], 1) for _, row in found.values()]
    headers = ["tok/s, simulated", *(f"{draft} {text}" for draft, text in found)]
    return table(headers, [*lines, [PLANNER, *planner]])


def measured_points(points: Rows) -> str:
    headers = ["draft", "text", "K", "tok/s, measured", "speed-up", "simulated", "off"]
    lines = []
    for each in points:
        done = "error" not in each
        off = each["speedup"] / each["simulated_speedup"] - 1 if done else None
        lines.append(
            [
                each["draft"],
                each["text"],
                each["K"],
                number(each.get("tokens_per_second"), 1),
                number(each.get("speedup")),
                number(each.get("simulated_speedup")),
                each["error"] if off is None else f"{off:+.1%}",
            ]
        )
    return table(headers, lines)
