"""From the samples of ``never_slower.py`` to its rows, targets and tables. Measures nothing.

A cell is one workload at one number of requests and one temperature. Its arms are compared by the
wall time of the same tokens, so a ratio above one is a higher rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import exp, log
from typing import Any

from harness import CONTROL, PLAIN, Sample, against_plain, first_error, paired_ratio
from report import Row, Target, grid, interval, number, table

OURS = "ours"
OVERHEAD_CELL = ("hostile", 1)
"""Workload and requests of the cell in which nothing is predictable."""
HOST_PHASES = ("propose", "plan")
PROSE_TARGET = "rate of prose beside edits / decoded plainly, worst cell"
OVERHEAD_TARGET = "probes + host time where nothing is predictable, share of the time, worst cell"
NOT_SLOWER = 0.99
"""A cell is slower where even the upper end of its interval lies below this."""
KEPT = (
    "output_tokens",
    "num_steps",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "seconds_per_prose_token",
)
COLUMNS = 7
"""Cells side by side in the tables of all arms."""
Times = dict[str, dict[Any, dict[int, float]]]
"""Seconds by arm, group and repeat."""


# --- one cell -------------------------------------------------------------------------------------


def cell_row(samples: Sequence[Sample], label: Row) -> dict[str, Any]:
    """Everything that is said about a cell; an ``error`` where plain or ours failed."""
    arms = {arm: against_plain(samples, arm) for arm in dict.fromkeys(s.arm for s in samples)}
    row: dict[str, Any] = {**label, "arms": arms}
    for arm in (PLAIN, OURS):
        if "error" in arms[arm]:
            return {**row, "error": arms[arm]["error"]}
    row |= against_others(_times([s for s in samples if "error" not in arms[s.arm]]))
    if beside := _ratio(samples, "seconds_per_prose_token"):
        row["prose_beside"] = beside
    if (label["workload"], label["requests"]) == OVERHEAD_CELL:
        row["overhead"] = overhead(samples)
    return row


def _times(samples: Iterable[Sample]) -> Times:
    times: Times = {}
    for s in samples:
        times.setdefault(s.arm, {}).setdefault(s.item, {})[s.repeat] = s.seconds or 0.0
    return times


def against_others(times: Times) -> dict[str, Any]:
    """Ours against the best other arm of the cell, and of each group of prompts (the oracle).

    Whoever is chosen for the shortest of several noisy times was also lucky. Held out, the choice
    for each repeat is made from the other repeats, which takes luck out of it.
    """
    others = [arm for arm in times if arm not in (OURS, CONTROL)]
    items, repeats = list(times[OURS]), list(next(iter(times[OURS].values())))

    def seconds(arm: str, groups: Iterable[Any], turns: Sequence[int]) -> float:
        return sum(statistics.median(times[arm][i][r] for r in turns) for i in groups)

    def fastest(groups: Sequence[Any], turns: Sequence[int]) -> str:
        return min(others, key=lambda arm: seconds(arm, groups, turns))

    def held_out(choices: Sequence[Sequence[Any]]) -> float | None:
        if len(repeats) < 2:
            return None
        chosen = ours = 0.0
        for turn in repeats:
            rest = [r for r in repeats if r != turn]
            for groups in choices:
                chosen += seconds(fastest(groups, rest), groups, [turn])
                ours += seconds(OURS, groups, [turn])
        return chosen / ours

    ours, best = seconds(OURS, items, repeats), fastest(items, repeats)
    singly = [[item] for item in items]
    oracle = sum(seconds(fastest(one, repeats), one, repeats) for one in singly)
    return {
        "best_other": best,
        "ours_to_best": seconds(best, items, repeats) / ours,
        "ours_to_best_held_out": held_out([items]),
        "ours_to_oracle": oracle / ours,
        "ours_to_oracle_held_out": held_out(singly),
    }


def _paired(samples: Iterable[Sample]) -> list[tuple[Sample, Sample]]:
    """Plain and ours of the same group and repeat."""
    found: dict[tuple[Any, int], dict[str, Sample]] = {}
    for sample in samples:
        found.setdefault((sample.item, sample.repeat), {})[sample.arm] = sample
    return [(pair[PLAIN], pair[OURS]) for pair in found.values() if {PLAIN, OURS} <= pair.keys()]


def _ratio(samples: Iterable[Sample], fact: str) -> dict[str, Any] | None:
    """A duration among the facts, plain over ours."""
    items: dict[Any, list[tuple[float, float]]] = {}
    for plain, ours in _paired(samples):
        if plain.facts[fact] is not None and ours.facts[fact] is not None:
            items.setdefault(plain.item, []).append((plain.facts[fact], ours.facts[fact]))
    return asdict(paired_ratio(list(items.values()))) if items else None


def overhead(samples: Iterable[Sample]) -> dict[str, float]:
    """Shares of our time that are spent beyond what plain decoding spends per step.

    Proposing holds the draft model's forwards, and ``rest`` is everything outside the target's
    forwards but the two phases that are named; ``verification`` is what draft nodes added to those
    forwards. Medians over the runs; the total is that of the runs' totals.
    """
    runs = []
    for plain, ours in _paired(samples):
        per_step = ours.facts["num_forwards"] / plain.facts["num_forwards"]
        beyond = {part: time - per_step * _host(plain)[part] for part, time in _host(ours).items()}
        beyond["verification"] = ours.facts["verification"]
        assert ours.seconds is not None
        shares = {part: time / ours.seconds for part, time in beyond.items()}
        runs.append({**shares, "total": sum(shares.values())})
    return {part: statistics.median(run[part] for run in runs) for part in runs[0]}


def _host(sample: Sample) -> dict[str, float]:
    """Seconds of a run outside the target's forwards, by part."""
    phases = sample.facts["phases"]
    parts = {phase: phases.get(phase, 0.0) for phase in HOST_PHASES}
    assert sample.seconds is not None
    return {**parts, "rest": sample.seconds - phases.get("forward", 0.0) - sum(parts.values())}


def raw(samples: Sequence[Sample], label: Row) -> list[dict[str, Any]]:
    """The samples of a cell as they are kept: per arm a list per measure, in order of the runs."""
    kept = []
    for arm in dict.fromkeys(sample.arm for sample in samples):
        own = [sample for sample in samples if sample.arm == arm]
        lists: dict[str, Any] = {
            "group": [s.item for s in own],
            "repeat": [s.repeat for s in own],
            "seconds": [s.seconds and round(s.seconds, 6) for s in own],
            **{name: [s.facts.get(name) for s in own] for name in KEPT},
        }
        if (label["workload"], label["requests"]) == OVERHEAD_CELL and arm in (PLAIN, OURS):
            lists["phases"] = [s.facts.get("phases") for s in own]
            lists["verification"] = [s.facts.get("verification") for s in own]
        used = {name: own for name, own in lists.items() if any(v is not None for v in own)}
        kept.append({**label, "arm": arm, **used, "error": first_error(own)})
    return kept


# --- all cells ------------------------------------------------------------------------------------


def targets(rows: Sequence[Row]) -> list[Target]:
    """What is aimed at over all cells; without a value where a cell failed."""
    rows = rows if all("error" not in row for row in rows) else []
    slower = [row for row in rows if row["arms"][OURS]["speedup"]["high"] < NOT_SLOWER]
    best = [row["ours_to_best"] for row in rows]
    oracle = [row["ours_to_oracle"] for row in rows]
    prose = [row["prose_beside"]["value"] for row in rows if "prose_beside" in row]
    spent = [row["overhead"]["total"] for row in rows if "overhead" in row]
    count = len(slower) if rows else None
    least = "at least"
    return [
        Target(f"cells whose upper 95 % bound of ours/plain is below {NOT_SLOWER}", count, 0),
        Target("ours / the best other arm, geometric mean", geometric_mean(best), 1.0, least),
        Target("ours / the best other arm, worst cell", min(best, default=None), 0.93, least),
        Target("ours / the hindsight oracle, geometric mean", geometric_mean(oracle), 0.95, least),
        Target(PROSE_TARGET, min(prose, default=None), 0.95, least),
        Target(OVERHEAD_TARGET, max(spent, default=None), 0.008),
    ]


def geometric_mean(values: Sequence[float]) -> float | None:
    return exp(statistics.fmean(map(log, values))) if values else None


# --- tables ---------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> list[str]:
    """Ours cell by cell, every arm cell by cell, and where its time goes that nothing comes of."""
    arms = [_all_arms(rows[at : at + COLUMNS]) for at in range(0, len(rows), COLUMNS)]
    return [_cells(rows), *arms, *_overheads(rows)]


def _cells(rows: Sequence[Row]) -> str:
    """Ratios are rates over rates; ``held out``: the other arm was chosen by the other repeats."""
    ours = f"arms/{OURS}/speedup"
    return table(
        *grid(
            rows,
            ("workload", "workload"),
            ("requests", "requests"),
            ("temp.", "temperature"),
            ("plain tok/s", f"arms/{PLAIN}/tokens_per_second", 0),
            ("control", f"arms/{CONTROL}/speedup/value", 3),
            ("ours/plain", f"{ours}/value", 3),
            ("95 % interval", lambda row: interval(row["arms"][OURS].get("speedup", {}), 3)),
            ("ours/best", "ours_to_best", 3),
            ("held out", "ours_to_best_held_out", 3),
            ("best other", "best_other"),
            ("ours/oracle", "ours_to_oracle", 3),
            ("held out", "ours_to_oracle_held_out", 3),
            ("prose beside", "prose_beside/value", 3),
            ("identical", lambda row: row.get("error") or _identical(row["arms"])),
        )
    )


def _identical(arms: Row) -> str:
    return "yes" if all(arm.get("identical") for arm in arms.values()) else "NO"


def _name(row: Row) -> str:
    return f"{row['workload']} x{row['requests']} @{row['temperature']:g}"


def _all_arms(rows: Sequence[Row]) -> str:
    """Each arm over plain, a column per cell."""
    lines = []
    for arm in dict.fromkeys(arm for row in rows for arm in row["arms"]):
        found = [row["arms"].get(arm, {}).get("speedup", {}).get("value") for row in rows]
        lines.append([arm, *(number(value, 3) for value in found)])
    return table(["arm / plain", *map(_name, rows)], lines)


def _overheads(rows: Sequence[Row]) -> list[str]:
    found = {_name(row): row["overhead"] for row in rows if "overhead" in row}
    lines = [[name, *(f"{share:.2%}" for share in own.values())] for name, own in found.items()]
    parts = next(iter(found.values()), {})
    return [table(["share of our time beyond plain", *parts], lines)] if found else []
