"""What ``recommended_pairs.py`` makes of its searches and runs: rows, targets, lines of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness import Sample, pair_up, paired_ratio
from predicted import CONTROL, PLAIN, TOLERANCE
from report import Target, number

from paceline.workbench.tune import Row, is_worthwhile

HEADERS = (
    "costs of",
    "status",
    "who drafts",
    "setting",
    "planner",
    "predicted",
    "pays",
    "length",
    "measured",
    "length",
)
COUNTED = ("num_steps", "num_draft_tokens", "num_accepted_tokens", "output_tokens")


def predicted_cells(pair: str, who: str, row: Row) -> dict[str, Any]:
    """What a row says of a setting that was searched for."""
    assert row.candidate is not None
    tokens, steps = (row.result.total(f"num_{name}") for name in ("emitted_tokens", "steps"))
    return {
        "pair": pair,
        "who": who,
        "setting": row.candidate.name,
        "planner": row.candidate.planner,
        "predicted": asdict(row.speedup),
        "pays": is_worthwhile(row),
        "predicted_length": tokens / steps,
    }


def control_cells(pair: str) -> dict[str, Any]:
    """The row of the plain engine that ran twice."""
    return {"pair": pair, "who": CONTROL, "setting": "-", "planner": "-", "predicted": None}


def measured_cells(samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    """What a row says of an arm; of one that failed, why."""
    errors = [sample.error for sample in samples if sample.arm in (PLAIN, arm) and sample.failed]
    if errors:
        return {"error": errors[0]}
    said = {sample.item: sample.facts["token_ids"] for sample in samples if sample.arm == PLAIN}
    runs = [sample for sample in samples if sample.arm == arm]
    tokens, steps = (sum(run.facts[key] for run in runs) for key in ("output_tokens", "num_steps"))
    return {
        "measured": asdict(paired_ratio(pair_up(samples, PLAIN, arm))),
        "measured_length": tokens / steps,
        "identical": all(run.facts["token_ids"] == said[run.item] for run in runs),
    }


def raw(pair: str, sample: Sample) -> dict[str, Any]:
    """A sample as it is saved."""
    fields = ("arm", "item", "repeat", "seconds", "error")
    facts = {key: sample.facts[key] for key in COUNTED if key in sample.facts}
    return {"pair": pair, **{name: getattr(sample, name) for name in fields}, **facts}


def targets(results: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Of what was measured; none where nothing was, and without values where a run failed."""
    tried = [row for row in results if "measured" in row or "error" in row]
    if not tried:
        return []
    done = tried if all("measured" in row for row in tried) else []
    off = [
        abs(row["predicted"]["value"] / row["measured"]["value"] - 1)
        for row in done
        if row["predicted"]
    ]
    same = sum(row["identical"] for row in done) / len(done) if done else None
    name = "predicted over measured speed-up: most that it is off"
    return [
        Target(name, max(off, default=None), TOLERANCE),
        Target("share of settings with outputs identical to plain decoding", same, 1.0, "at least"),
    ]


def cells(row: Mapping[str, Any]) -> list[str]:
    """A line of the table under :data:`HEADERS`."""
    return [
        row["pair"],
        _status(row),
        row["who"],
        row["setting"],
        row["planner"],
        _interval(row["predicted"]),
        {True: "yes", False: "no", None: "-"}[row.get("pays")],
        number(row.get("predicted_length")),
        row["error"] if "error" in row else _interval(row.get("measured")),
        number(row.get("measured_length")),
    ]


def _status(row: Mapping[str, Any]) -> str:
    """What the row's speed-up rests on."""
    if "error" in row:
        return "failed"
    return "measured" if "measured" in row else "predicted"


def _interval(found: Mapping[str, Any] | None) -> str:
    """Without an interval where there were too few answers for one."""
    if not found:
        return "-"
    said = "{value:.2f}" if found["low"] is None else "{value:.2f} ({low:.2f} to {high:.2f})"
    return said.format(**found)
