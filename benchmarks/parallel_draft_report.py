"""The rows of ``parallel_draft.py``, from its samples to its tables. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness import Sample, pair_up, paired_ratio
from report import Target, number, table

PLAIN, SEQUENTIAL, PARALLEL = "plain", "draft_model", "parallel_draft"
PLANNED = ("planner", "planner, tree")
"""In the place of a number of tokens: the planner decides, up to the configuration's."""
WANTED = 1.15


def arm(method: str, length: int | str) -> str:
    return f"{method}, {length}"


def row_of(samples: Sequence[Sample], method: str, length: int | str) -> dict[str, Any]:
    """Speed and acceptance of one arm.

    ``accepted_by_depth`` are shares of the drafts of which at least so many tokens were accepted.
    """
    name = arm(method, length)
    own = [sample for sample in samples if sample.arm == name]
    plain = [sample for sample in samples if sample.arm == PLAIN]
    error = next((sample.error for sample in [*own, *plain] if sample.failed), None)
    if error is not None:
        return {"method": method, "length": length, "error": error}
    truth = {(s.item, s.repeat): s.facts["token_ids"] for s in plain}
    drafts, steps = (sum(s.facts[key] for s in own) for key in ("num_drafts", "num_steps"))
    tokens = sum(len(s.facts["token_ids"]) for s in own)
    by_depth = [sum(counts) for counts in zip(*(s.facts["by_depth"] for s in own), strict=True)]
    seconds = sum(sample.seconds or 0.0 for sample in own)
    return {
        "method": method,
        "length": length,
        "mean_acceptance_length": tokens / steps,
        "accepted_by_depth": [count / max(1, drafts) for count in by_depth],
        "tokens_per_second": tokens / seconds,
        "step_ms": 1e3 * seconds / steps,
        "speedup": asdict(paired_ratio(pair_up(samples, PLAIN, name))),
        "identical": all(s.facts["token_ids"] == truth[s.item, s.repeat] for s in own),
    }


def ratios(samples: Sequence[Sample], lengths: Sequence[int | str]) -> list[dict[str, Any]]:
    """How much faster the parallel draft is than the sequential one at equal lengths."""
    found = []
    for length in lengths:
        pairs = pair_up(samples, arm(SEQUENTIAL, length), arm(PARALLEL, length))
        if any(pairs):
            found.append({"length": length, "ratio": asdict(paired_ratio(pairs))})
    return found


def best(rows: Sequence[Mapping[str, Any]], method: str) -> Mapping[str, Any] | None:
    """The row in which a method is fastest."""
    own = [row for row in rows if row["method"] == method and "speedup" in row]
    return max(own, key=lambda row: row["speedup"]["value"], default=None)


def targets(results: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Each in the row in which it is fastest, greedily: what a user would set."""
    greedy = [row for row in results if row["kind"] == "arm" and row["temperature"] == 0.0]
    fastest = {method: best(greedy, method) for method in (SEQUENTIAL, PARALLEL)}
    value = None
    if all(fastest.values()):
        speeds = {m: row["speedup"]["value"] for m, row in fastest.items() if row}
        value = speeds[PARALLEL] / speeds[SEQUENTIAL]
    done = [row for row in results if row["kind"] == "arm"]
    identical = sum(bool(row.get("identical")) for row in done)
    return [
        Target("parallel over sequential, greedy, each at its fastest", value, WANTED, _LEAST),
        Target(
            "share of arms with identical output",
            identical / len(done) if done else None,
            1.0,
            _LEAST,
        ),
    ]


_LEAST = "at least"


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """By length; by depth of the longest drafts."""
    return [_by_length(results, t) for t in _temperatures(results)] + [_by_depth(results)]


def _temperatures(results: Sequence[Mapping[str, Any]]) -> list[float]:
    return list(dict.fromkeys(row["temperature"] for row in results if "temperature" in row))


def _by_length(results: Sequence[Mapping[str, Any]], temperature: float) -> str:
    rows = [row for row in results if row.get("temperature") == temperature]
    found = {(row["method"], row["length"]): row for row in rows if row["kind"] == "arm"}
    ratio = {row["length"]: row["ratio"] for row in rows if row["kind"] == "ratio"}
    times = {(r["method"], r["length"]): r["draft_ms"] for r in results if r["kind"] == "time"}
    lines = []
    for length in dict.fromkeys(length for _, length in found):
        pair = [found.get((method, length), {}) for method in (SEQUENTIAL, PARALLEL)]
        drafts = [times.get((method, length)) for method in (SEQUENTIAL, PARALLEL)]
        cells = [number(ms, 3) for ms in drafts]
        cells += [number(row.get("mean_acceptance_length")) for row in pair]
        cells += [number(row.get("speedup", {}).get("value")) for row in pair]
        steps = [row.get("step_ms") for row in pair]
        cells.append(number(steps[0] / steps[1] if all(steps) else None))
        lines.append([length, *cells, _interval(ratio.get(length))])
    headers = ["tokens", "draft, ms", "parallel, ms", "length", "parallel length"]
    headers += ["speed-up", "parallel speed-up", "steps", "parallel over sequential"]
    return f"Temperature {temperature:g}\n\n" + table(headers, lines)


def _by_depth(results: Sequence[Mapping[str, Any]]) -> str:
    """Shares of drafts of which at least so many tokens were accepted, at the greatest length."""
    arms = [row for row in results if row["kind"] == "arm" and isinstance(row["length"], int)]
    longest = max((row["length"] for row in arms), default=0)
    lines = [
        [
            f"{row['method']}, temperature {row['temperature']:g}",
            *(f"{share:.0%}" for share in row["accepted_by_depth"][:longest]),
        ]
        for row in arms
        if row["length"] == longest and "error" not in row
    ]
    headers = [f"accepted of {longest}", *(f">= {depth}" for depth in range(1, longest + 1))]
    return table(headers, lines)


def _interval(ratio: Mapping[str, float] | None) -> str:
    if ratio is None:
        return "-"
    return f"{number(ratio['value'])} ({number(ratio['low'])} to {number(ratio['high'])})"
