"""The tables of ``ngram_models.py``: held-out figures, replays and targets. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from report import Target, number, table

BASE, BEST = "2, stupid-backoff", "4, modified-kneser-ney"
ALONE, WITH_TEXT = "alone", "with the text"
CHAIN, TREE = "chain of 4", "tree of 16"
EVERY_TEXT = "all texts"
WANTED = 1.5
CANDIDATES = ("top_1", "top_2", "top_4")

PREDICTED = {BASE: "6 %", "3, absolute": "16 %", BEST: "20 to 30 %"}
"""Acceptance of n-gram drafts as it was foretold, beside the plainest, a middle and the best."""

Row = Mapping[str, Any]


def arm(model: str, how: str) -> str:
    """What a model is called that drafts by itself, or together with the request's own text."""
    return f"{model}, {how}"


def per_step(rows: Sequence[Row], proposer: str, text: str, shape: str) -> float | None:
    """Accepted draft tokens per step, of one text or over all of them."""
    return _share(rows, proposer, text, shape, "num_steps")


def per_draft(rows: Sequence[Row], proposer: str, text: str, shape: str) -> float | None:
    """Share of the drafted tokens that were accepted."""
    return _share(rows, proposer, text, shape, "num_draft_tokens")


def _share(rows: Sequence[Row], proposer: str, text: str, shape: str, below: str) -> float | None:
    found = [
        row
        for row in rows
        if row.get("proposer") == proposer
        and row["shape"] == shape
        and text in (row["text"], EVERY_TEXT)
    ]
    total = sum(row[below] for row in found)
    return sum(row["num_accepted_tokens"] for row in found) / total if total else None


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """The best model against the plain table: both by themselves, and the model as it is used."""
    base = arm(BASE, ALONE)
    found = []
    for how, said in ((ALONE, "table against table"), (WITH_TEXT, "as used, against the table")):
        for text in (*_texts(rows), EVERY_TEXT):
            best, plain = (per_step(rows, each, text, TREE) for each in (arm(BEST, how), base))
            ratio = best / plain if best is not None and plain else None
            name = f"{text}, {TREE}: accepted per step, {said}"
            found.append(Target(name, ratio, WANTED, "at least"))
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    """Held-out figures by order and smoothing, then accepted tokens per step of the replays."""
    return [held_out_table(rows), *(_replays(rows, shape) for shape in _shapes(rows))]


def held_out_table(rows: Sequence[Row]) -> str:
    headers = ["order, smoothing", "nats", "longest known", "drafted", "top 1", "top 2", "top 4"]
    texts = _texts(rows)
    headers += [*(f"accepted of drafted, {text}" for text in texts), "predicted"]
    lines = []
    for row in rows:
        if "model" not in row:
            continue
        shares = [row.get("hit_rate"), row["drafted"], *(row[each] for each in CANDIDATES)]
        names = (arm(row["model"], ALONE), row["model"])
        names = {row["model"], arm(row["model"], ALONE)}
        chains = [_first(per_draft(rows, name, text, CHAIN) for name in names) for text in texts]
        cells = [percent(share) for share in [*shares, *chains]]
        cells.append(PREDICTED.get(row["model"], "-"))
        lines.append([row["model"], number(row.get("cross_entropy"), 3), *cells])
    return table(headers, lines)


def _replays(rows: Sequence[Row], shape: str) -> str:
    texts = [*_texts(rows), EVERY_TEXT]
    names = dict.fromkeys(row["proposer"] for row in rows if row.get("shape") == shape)
    lines = [
        [name, *(number(per_step(rows, name, text, shape)) for text in texts)] for name in names
    ]
    return table([f"accepted per step, {shape}", *texts], lines)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _first(shares: Iterable[float | None]) -> float | None:
    return next((share for share in shares if share is not None), None)


def _texts(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["text"] for row in rows if "shape" in row))


def _shapes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["shape"] for row in rows if "shape" in row))
