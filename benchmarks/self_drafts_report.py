"""The rows of ``self_drafts.py``, from its samples to its tables. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness import Sample, pair_up, paired_ratio
from report import Target, number, table

PLAIN = "plain"
DEPTH = 4
"""Tokens of a draft."""
HEADERS = ("bits", "layers", "bytes", "step", "acceptance length", "rate", "speed-up")
COUNTED = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")


def outcome(samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    """What was accepted of one arm's drafts, and its time against plain decoding."""
    own = [sample for sample in samples if sample.arm == arm]
    plain = [sample for sample in samples if sample.arm == PLAIN]
    error = next((sample.error for sample in [*own, *plain] if sample.failed), None)
    if error is not None:
        return {"error": error}
    total = {name: sum(sample.facts[name] for sample in own) for name in COUNTED}
    truth = {(sample.item, sample.repeat): sample.facts["token_ids"] for sample in plain}
    return {
        "acceptance_rate": total["num_accepted_tokens"] / max(1, total["num_draft_tokens"]),
        "mean_acceptance_length": sum(len(s.facts["token_ids"]) for s in own) / total["num_steps"],
        "speedup": asdict(paired_ratio(pair_up(samples, PLAIN, arm))),
        "identical": all(s.facts["token_ids"] == truth[s.item, s.repeat] for s in own),
    }


def raw(sample: Sample, target: str, prompts: Sequence[Any]) -> dict[str, Any]:
    """A sample as it is kept: numbers of prompts and tokens instead of the tokens."""
    facts = dict(sample.facts)
    facts["output_tokens"] = len(facts.pop("token_ids", ()))
    kept = {"target": target, "arm": sample.arm, "item": prompts.index(sample.item)}
    return {**kept, **asdict(sample), **kept, "facts": facts}


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table per target."""
    found = []
    for target in dict.fromkeys(row["target"] for row in rows):
        lines = [cells(row) for row in rows if row["target"] == target]
        found.append(f"{target} target, chains of {DEPTH}\n" + table(HEADERS, lines))
    return found


def targets_of(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    same = [bool(row.get("identical")) for row in rows]
    share = sum(same) / len(same) if same else None
    return [Target("answers identical to plain decoding, share of rows", share, 1.0, "at least")]


def cells(row: Mapping[str, Any]) -> list[str]:
    """Bytes and time of a step are shares of the target's."""
    if "error" in row:
        return [row["bits"], row["layers"], row["error"], *["-"] * 4]
    ratio = row["speedup"]
    return [
        row["bits"],
        row["layers"],
        number(row.get("share_of_bytes")),
        number(row.get("step_ratio")),
        number(row["mean_acceptance_length"]),
        f"{row['acceptance_rate']:.0%}",
        f"{number(ratio['value'])} ({number(ratio['low'])} to {number(ratio['high'])})",
    ]
