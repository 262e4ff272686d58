"""From the samples of ``heads.py`` to its rows, targets and tables. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

import speedup
from harness import CONTROL, PLAIN, Sample, against_plain, first_error, pair_up, paired_ratio
from never_slower_report import geometric_mean
from report import Row, Target, grid, identical_target, markdown, number, pick, ratio_cell

from paceline.request.metrics import SpeculationCounters

SUFFIX, NGRAM, TREE, MERGED = "suffix", "n-gram", "tree", "merged"
TEXTS = "suffix and n-gram"
NODES = "chain of as many nodes"
CHAINS = {f"chain of {length}": length for length in (2, 3, 4, 5)}
PEER = "llama.cpp"
EQUAL_NODES, EQUAL_TIME, BEST_SINGLE = "equal nodes", "equal milliseconds", "best single one"
LENGTHS = {0.0: 2.6, 0.8: 2.0}
"""Wanted of MT-bench, by temperature."""
SPEEDS = {False: {0.0: 1.6, 0.8: 1.25}, True: {0.0: 1.9, 0.8: 1.4}}
"""The same, by whether the model is inflated."""
SHOWN = 5
"""Depths in a table."""
BUSY = "prose, 8 requests"
"""A cell where drafts hardly pay."""


def count(outputs: Sequence[Any]) -> dict[str, Any]:
    """What other programs count, and how many drafts reached each depth and were accepted to it."""
    own = SpeculationCounters()
    for output in outputs:
        own.add(output.completions[0].counters)
    by_depth = {"reached": own.num_drafts_per_pos, "accepted": own.num_accepted_tokens_per_pos}
    return {**speedup.count(outputs), **by_depth}


def checked(samples: Sequence[Sample]) -> list[Sample]:
    """A sample of ours with other token ids than plain decoding's is a failed one."""
    plain = {(s.item, s.repeat): s.facts.get("token_ids") for s in samples if s.arm == PLAIN}
    wrong = "its token ids are not those of plain decoding"
    return [
        s
        if s.failed or s.arm == PEER or plain[s.item, s.repeat] in (None, s.facts["token_ids"])
        else replace(s, seconds=None, error=wrong)
        for s in samples
    ]


def rows_of(samples: Sequence[Sample], arms: Sequence[str]) -> list[dict[str, Any]]:
    """A cell: each arm against plain, then arms against each other: the other's seconds over ours.

    With llama.cpp the seconds of a token are compared, as its text may differ.
    """
    rows = arm_rows(samples, arms)
    speeds = {row["arm"]: row["speedup"]["value"] for row in rows if "error" not in row}

    def over(kind: str, ours: str, others: Iterable[str], runs: Sequence[Sample]) -> dict[str, Any]:
        others = [arm for arm in others if arm in arms]
        error = first_error(s for s in runs if s.arm in (ours, PLAIN, *others))
        if error is not None:
            return {"kind": kind, "ours": ours, "error": error}
        other = max(others, key=lambda arm: speeds.get(arm, 0.0))
        ratio = asdict(paired_ratio(pair_up(runs, other, ours)))
        return {"kind": kind, "ours": ours, "other": other, "speedup": ratio}

    found = [
        over(EQUAL_NODES, TREE, [NODES], samples),
        over(EQUAL_TIME, TREE, CHAINS, samples),
        over(BEST_SINGLE, MERGED, [SUFFIX, NGRAM, TREE], samples),
    ]
    if PEER in arms:
        per_token = [s if s.failed else _per_token(s) for s in samples]
        found += [over(PEER, ours, [PEER], per_token) for ours in (PLAIN, MERGED)]
    return [*rows, *found]


def arm_rows(samples: Sequence[Sample], arms: Iterable[str]) -> list[dict[str, Any]]:
    """Each arm against plain decoding, and what became of its drafts."""
    return [_arm_row(samples, arm) for arm in arms if arm not in (PLAIN, PEER)]


def _per_token(sample: Sample) -> Sample:
    return replace(sample, seconds=(sample.seconds or 0.0) / sample.facts["output_tokens"])


def _arm_row(samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    row = against_plain(samples, arm)
    if "error" in row:
        return row
    own = [s.facts for s in samples if s.arm == arm]
    reached, accepted = (
        [sum(counts) for counts in zip_longest(*(facts[key] for facts in own), fillvalue=0)]
        for key in ("reached", "accepted")
    )
    drafted = sum(f["num_draft_tokens"] for f in own) / sum(f["num_steps"] for f in own)
    shares = [a / r for r, a in zip_longest(reached, accepted, fillvalue=0)]
    return {**row, "drafted_per_step": drafted, "accepted_share": shares}


def targets(results: Sequence[Row], inflated: bool) -> list[Target]:
    """What is aimed at; no value where it was not measured or a sample behind it failed."""
    found = []

    def aim(name: str, value: float | None, wanted: float) -> None:
        found.append(Target(name, value, wanted, "at least"))

    def ratios(**wanted: Any) -> list[float]:
        rows = pick(results, **wanted)
        return [] if any("error" in r for r in rows) else [r["speedup"]["value"] for r in rows]

    for temperature, length in LENGTHS.items():
        cell = {"set": "mt_bench", "temperature": temperature, "arm": MERGED}
        name = f"MT-bench at {temperature:g}, merged"
        lengths = [row.get("mean_acceptance_length") for row in pick(results, **cell)]
        aim(f"{name}: mean acceptance length", next(iter(lengths), None), length)
        speed = next(iter(ratios(**cell)), None)
        aim(f"{name}: speed over plain", speed, SPEEDS[inflated][temperature])
    if inflated:
        both = [ratios(set=name, temperature=0.0, arm=MERGED) for name in ("code", "edit")]
        value = min(both[0] + both[1]) if all(both) else None
        aim("code and edits, greedy, merged, the slower one: speed over plain", value, 2.0)
    single, chains = ratios(kind=BEST_SINGLE), ratios(kind=EQUAL_TIME)
    aim(f"tree over chain, {EQUAL_TIME}, geometric mean", geometric_mean(chains), 1.1)
    aim(f"merged over the {BEST_SINGLE}, geometric mean", geometric_mean(single), 1.08)
    aim(f"merged over the {BEST_SINGLE}, least", min(single, default=None), 0.98)
    busy = pick(results, set=BUSY, arm=MERGED)
    bounds = [row["speedup"]["high"] for row in busy if "error" not in row]
    aim(f"{BUSY}, merged: upper bound of the speed over plain", min(bounds, default=None), 0.99)
    peer = geometric_mean(ratios(kind=PEER, ours=MERGED))
    aim(f"merged over {PEER} plain, greedy, geometric mean", peer, 3.0)
    return [*found, identical_target([row for row in results if "arm" in row])]


def tables(results: Sequence[Row]) -> list[str]:
    """Speeds over plain decoding, what became of the drafts, and arms against each other."""
    rows = [row for row in results if "arm" in row]
    cell = (("prompts", "set"), ("temperature", "temperature"))
    drafts = grid(
        [row for row in rows if row["arm"] != CONTROL],
        *cell,
        ("drafts", "arm"),
        ("tokens per step", "mean_acceptance_length", 2),
        ("drafted per step", "drafted_per_step", 1),
        (f"accepted at depth 1 to {SHOWN}", _shares),
    )
    others = grid(
        [row for row in results if "kind" in row],
        *cell,
        ("compared", "kind"),
        ("ours", "ours"),
        ("other", lambda row: row.get("other") or row["error"]),
        ("ours over other", ratio_cell),
    )
    return [speedup.comparison(rows, dict(cell)), markdown(*drafts), markdown(*others)]


def _shares(row: Row) -> str:
    return " ".join(number(share, 2) for share in row.get("accepted_share", ())[:SHOWN]) or "-"
