"""From the samples of ``never_slower.py`` to its rows, targets and tables. Measures nothing.

A cell is one workload at one number of requests and one temperature. Its arms are compared by the
wall time of the same tokens, so a ratio above one is a higher rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import exp, log
from typing import Any

from harness import Sample, pair_up, paired_ratio
from report import Target, interval, number, table

PLAIN, CONTROL, OURS = "plain", "plain again", "ours"
OVERHEAD_CELL = ("hostile", 1)
"""Workload and requests of the cell in which nothing is predictable."""
HOST_PHASES = ("propose", "plan")
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
Row = Mapping[str, Any]
Times = dict[str, dict[Any, dict[int, float]]]
"""Seconds by arm, group and repeat."""


# --- one cell -------------------------------------------------------------------------------------


def cell_row(samples: Sequence[Sample], label: Row) -> dict[str, Any]:
    """Everything that is said about a cell; an ``error`` where plain or ours failed."""
    arms = {arm: _arm(samples, arm) for arm in dict.fromkeys(s.arm for s in samples)}
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


def _arm(samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    """One arm against the plain one."""
    own = [sample for sample in samples if sample.arm == arm]
    plain = {(s.item, s.repeat): s for s in samples if s.arm == PLAIN}
    error = next((s.error for s in [*own, *plain.values()] if s.failed), None)
    if error is not None:
        return {"error": error}
    tokens = sum(s.facts["output_tokens"] for s in own)
    steps = sum(s.facts["num_steps"] for s in own)
    expected = {key: sample.facts["token_ids"] for key, sample in plain.items()}
    return {
        "speedup": asdict(paired_ratio(pair_up(samples, PLAIN, arm))),
        "tokens_per_second": tokens / sum(s.seconds or 0.0 for s in own),
        "mean_acceptance_length": tokens / steps if steps else 0.0,
        "identical": all(s.facts["token_ids"] == expected[s.item, s.repeat] for s in own),
    }


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
        error = next((s.error for s in own if s.failed), None)
        used = {
            name: values for name, values in lists.items() if any(v is not None for v in values)
        }
        kept.append({**label, "arm": arm, **used, "error": error})
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
        Target(
            "rate of prose beside edits / decoded plainly, worst cell",
            min(prose, default=None),
            0.95,
            least,
        ),
        Target(
            "probes + host time where nothing is predictable, share of the time, worst cell",
            max(spent, default=None),
            0.008,
        ),
    ]


def geometric_mean(values: Sequence[float]) -> float | None:
    return exp(statistics.fmean(map(log, values))) if values else None


COLUMNS = 7
"""Cells side by side in the tables of all arms."""


# --- tables ---------------------------------------------------------------------------------------


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
        interval(ours, 3),
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
