"""From the rows of ``never_slower_replayed.py`` to its targets and tables. Replays nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from never_slower_report import NOT_SLOWER, OURS, geometric_mean
from report import Target, number, table

Row = Mapping[str, Any]
CROWDS = (("1 request", 1, 1), ("2", 2, 2), ("4 or more", 4, 1 << 30))
"""Numbers of requests that are taken together."""


def targets(rows: Sequence[Row]) -> list[Target]:
    found = []
    for pair in dict.fromkeys(row["pair"] for row in rows):
        own = [row for row in rows if row["pair"] == pair]
        slower = sum(row["arms"][OURS] < NOT_SLOWER for row in own)
        best = [row["ours_to_best"] for row in own]
        oracle = geometric_mean([row["ours_to_oracle"] for row in own])
        prose = min((row["prose_beside"] for row in own if "prose_beside" in row), default=None)
        least = "at least"
        found += [
            Target(f"{pair}: cells whose ours/plain is below {NOT_SLOWER}", slower, 0),
            Target(f"{pair}: ours / the best other arm, mean", geometric_mean(best), 1.0, least),
            Target(f"{pair}: ours / the best other arm, worst cell", min(best), 0.93, least),
            Target(f"{pair}: ours / the hindsight oracle, mean", oracle, 0.95, least),
            Target(f"{pair}: rate of prose beside edits, worst cell", prose, 0.95, least),
        ]
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    return [*summaries(rows), cells(rows)]


def summaries(rows: Sequence[Row]) -> list[str]:
    """By pair, requests and whether text is sampled: means over the workloads, and worst cells."""
    headers = ["pair", "requests", "text", "cells", "ours/plain", "worst", "ours/best", "worst"]
    headers += ["ours/oracle", "worst of ours/plain"]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        text = "sampled" if row["temperature"] else "greedy"
        groups.setdefault((row["pair"], row["requests"], text), []).append(row)
    lines = []
    for group, own in groups.items():
        gains, best = [row["arms"][OURS] for row in own], [row["ours_to_best"] for row in own]
        figures = [geometric_mean(gains), min(gains), geometric_mean(best), min(best)]
        figures.append(geometric_mean([row["ours_to_oracle"] for row in own]))
        worst = min(own, key=lambda row: row["arms"][OURS])
        shown = [number(figure, 3) for figure in figures]
        lines.append([*group, len(own), *shown, worst["workload"]])
    return [table(headers, lines), rules(rows)]


def rules(rows: Sequence[Row]) -> str:
    """Every arm over plain: the mean and the worst cell, of one request and of several."""
    headers, columns = ["arm / plain"], []
    for pair in dict.fromkeys(row["pair"] for row in rows):
        for label, least, most in CROWDS:
            own = [row for row in rows if row["pair"] == pair and least <= row["requests"] <= most]
            if own:
                headers += [f"{pair}, {label}", "worst"]
                columns.append(own)
    lines = []
    for arm in dict.fromkeys(arm for row in rows for arm in row["arms"]):
        figures = []
        for own in columns:
            gains = [row["arms"][arm] for row in own]
            figures += [geometric_mean(gains), min(gains)]
        lines.append([arm, *(number(figure, 3) for figure in figures)])
    return table(headers, lines)


def cells(rows: Sequence[Row]) -> str:
    headers = ["pair", "workload", "temp.", "requests", "plain tok/s", "ours/plain", "length"]
    headers += ["ours/best", "best other", "its ratio", "ours/oracle", "prose beside"]
    lines = [
        [
            *(row["pair"], row["workload"], f"{row['temperature']:g}", row["requests"]),
            number(row["plain_tokens_per_second"], 0),
            number(row["arms"][OURS], 3),
            number(row["acceptance_length"]),
            number(row["ours_to_best"], 3),
            row["best_other"],
            number(row["arms"][row["best_other"]], 3),
            number(row["ours_to_oracle"], 3),
            number(row.get("prose_beside"), 3),
        ]
        for row in rows
    ]
    return table(headers, lines)
