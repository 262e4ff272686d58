"""What ``curves.py`` makes of its replays: rows, targets and tables. Replays nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from report import Target, number, table

LONGEST = 8
LENGTHS = range(1, LONGEST + 1)
RULES = ("p_min", "P(draft) x speed")
PLAIN, OURS, OURS_TREES = "plain", "planner", "planner, trees"
BEST_FIXED, BEST_STEPS = "best fixed of each prompt", "best drafts of each step"


def fixed(length: int) -> str:
    return f"fixed, K = {length}"


def cells_of(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows by curve, text and proposer, then by arm."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in results:
        key = each["curve"], each["text"], each["proposer"]
        found.setdefault(key, {})[each["arm"]] = each
    return found


def best_fixed(arms: Mapping[str, Any]) -> str:
    return max(map(fixed, LENGTHS), key=lambda arm: arms[arm]["speedup"])


def targets(results: Sequence[Mapping[str, Any]]) -> list[Target]:
    whole = [
        arms for arms in cells_of(results).values() if not any("error" in r for r in arms.values())
    ]
    if len(whole) < len(cells_of(results)):
        whole = []
    plain = [arms[OURS]["speedup"] for arms in whole]
    rivals = [
        arms[OURS]["speedup"] / max(arms[arm]["speedup"] for arm in (best_fixed(arms), *RULES))
        for arms in whole
    ]
    oracle = [arms[OURS]["speedup"] / arms[BEST_FIXED]["speedup"] for arms in whole]
    return [
        Target("ours / plain, worst cell", min(plain, default=None), 0.99, "at least"),
        Target("ours / the best other arm, geometric mean", geometric(rivals), 1.0, "at least"),
        Target(
            "ours / the best other arm, worst cell", min(rivals, default=None), 0.93, "at least"
        ),
        Target(
            "ours / best fixed of each prompt, geometric mean", geometric(oracle), 0.95, "at least"
        ),
    ]


def geometric(values: Sequence[float]) -> float | None:
    return exp(fmean(map(log, values))) if values else None


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    curves = list(dict.fromkeys(each["curve"] for each in results))
    letters = {name: chr(ord("A") + index) for index, name in enumerate(curves)}
    legend = "\n".join(f"{letter}: {name}" for name, letter in letters.items())
    return [
        legend,
        ranking(results, letters),
        choices(results, letters),
        machines(results, letters),
    ]


def ranking(results: Sequence[Mapping[str, Any]], letters: Mapping[str, str]) -> str:
    headers = [
        "curve",
        "text",
        "proposer",
        "best K",
        *RULES,
        OURS,
        OURS_TREES,
        BEST_FIXED,
        BEST_STEPS,
    ]
    lines = []
    for (curve, text, proposer), arms in cells_of(results).items():
        done = not any("error" in each for each in arms.values())
        best = best_fixed(arms) if done else None
        first = f"{arms[best]['speedup']:.2f} at {best[len(fixed(0)) - 1 :]}" if best else "-"
        rest = [number(arms[arm].get("speedup")) for arm in headers[4:]]
        lines.append([letters[curve], text, proposer, first, *rest])
    return table(headers, lines)


def choices(results: Sequence[Mapping[str, Any]], letters: Mapping[str, str]) -> str:
    """How often the planner verified so many nodes, with chains."""
    lines = []
    for (curve, text, proposer), arms in cells_of(results).items():
        # JSON makes the counts strings.
        nodes = {int(count): times for count, times in arms[OURS].get("nodes", {}).items()}
        steps = sum(nodes.values()) or 1
        shares = [f"{nodes.get(count, 0) / steps:.0%}" for count in range(LONGEST + 1)]
        mean = number(arms[OURS].get("nodes_per_step"))
        lines.append([letters[curve], text, proposer, mean, *shares])
    return table(
        ["nodes of the planner", "text", "proposer", "mean", *map(str, range(LONGEST + 1))], lines
    )


def machines(results: Sequence[Mapping[str, Any]], letters: Mapping[str, str]) -> str:
    """The same drafts of the draft model through every curve, all texts together."""
    sums: dict[tuple[str, str], list[float]] = {}
    lengths: dict[str, list[float]] = {}
    for each in results:
        if each["proposer"] == "draft_model" and "error" not in each:
            times = sums.setdefault((each["arm"], each["curve"]), [0.0, 0.0])
            times[0] += each["plain_time"]
            times[1] += each["time"]
            lengths.setdefault(each["arm"], []).append(each["acceptance_length"])
    known = [name for name in letters if (PLAIN, name) in sums]
    lines = [
        [
            arm,
            number(fmean(lengths[arm])) if arm in lengths else "-",
            *(number(divided(sums.get((arm, name)))) for name in known),
        ]
        for arm in (*map(fixed, LENGTHS), *RULES, OURS)
    ]
    return table(["draft model, all texts", "accepted length", *(letters[n] for n in known)], lines)


def divided(times: Sequence[float] | None) -> float | None:
    return times[0] / times[1] if times else None
