"""The tables of ``never_slower.py``, for the terminal and for the documentation alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from never_slower_report import CONTROL, OURS, PLAIN
from report import number, table

COLUMNS = 7
"""Cells side by side in the tables of all arms."""
Row = Mapping[str, Any]


def tables(rows: Sequence[Row]) -> list[str]:
    """Ours cell by cell, every arm cell by cell, and where its time goes that nothing comes of."""
    arms = [_all_arms(rows[at : at + COLUMNS]) for at in range(0, len(rows), COLUMNS)]
    return [_cells(rows), *arms, *_overheads(rows)]


def _cells(rows: Sequence[Row]) -> str:
    """Ratios are rates over rates; ``held out``: the other arm was chosen by the other repeats."""
    headers = ["workload", "requests", "temp.", "plain tok/s", "control", "ours/plain"]
    headers += ["95 % interval", "ours/best", "held out", "best other", "ours/oracle", "held out"]
    headers += ["prose beside", "identical"]
    return table(headers, [_cell(row) for row in rows])


def _cell(row: Row) -> list[object]:
    arms = row["arms"]
    ours = arms[OURS].get("speedup", {})
    same = all(arm.get("identical") for arm in arms.values())
    return [
        *(row[key] for key in ("workload", "requests", "temperature")),
        number(arms[PLAIN].get("tokens_per_second"), 0),
        number(arms[CONTROL].get("speedup", {}).get("value"), 3),
        number(ours.get("value"), 3),
        f"{number(ours.get('low'), 3)} to {number(ours.get('high'), 3)}",
        number(row.get("ours_to_best"), 3),
        number(row.get("ours_to_best_held_out"), 3),
        row.get("best_other", "-"),
        number(row.get("ours_to_oracle"), 3),
        number(row.get("ours_to_oracle_held_out"), 3),
        number(row.get("prose_beside", {}).get("value"), 3),
        row.get("error") or ("yes" if same else "NO"),
    ]


def _all_arms(rows: Sequence[Row]) -> str:
    """Each arm over plain, a column per cell."""
    names = [f"{row['workload']} x{row['requests']} @{row['temperature']:g}" for row in rows]
    lines = []
    for arm in dict.fromkeys(arm for row in rows for arm in row["arms"]):
        found = [row["arms"].get(arm, {}).get("speedup", {}).get("value") for row in rows]
        lines.append([arm, *(number(value, 3) for value in found)])
    return table(["arm / plain", *names], lines)


def _overheads(rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if "overhead" in row]
    if not found:
        return []
    parts = list(found[0]["overhead"])
    lines = [
        [
            f"{row['workload']} x{row['requests']} @{row['temperature']:g}",
            *(f"{row['overhead'][part]:.2%}" for part in parts),
        ]
        for row in found
    ]
    return [table(["share of our time beyond plain", *parts], lines)]
