"""The workloads of ``never_slower.py`` as token ids: what serving benchmarks run, and harder ones.

Some are made here: prompts of a fixed number of tokens out of sonnets or at random, JSON records
that break off, and batches of which one half is prose and the other edits. Knows no engine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prompt_sets import PromptSets, data_folder, spread

SERVED_TOKENS = (550, 128)
"""Prompt and output tokens of the sonnet and random workloads."""
SONNET_LINES = 160
RECORDS = 4
RECORD_TEXT = 60
"""Characters of the text in a JSON record."""

Encode = Callable[[str], list[int]]


class MissingWorkloadError(Exception):
    """The data of a workload is not there."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind.

    Attributes:
        groups: of as many prompts as run in one batch.
        prose: places in each group where the prompts are prose beside repetitive ones; empty
            where all are of one kind.
    """

    name: str
    groups: list[list[list[int]]]
    prose: range = range(0)


DESCRIPTIONS = {
    "code": "HumanEval, or the embedded code prompts",
    "mt_bench": "MT-bench, first turns",
    "spec_bench": "Spec-Bench, first turns",
    "gsm8k": "GSM8K questions",
    "sonnet": "550 tokens of Shakespeare's sonnets, 128 out",
    "random": "550 random tokens, 128 out",
    "edit": "edit transcripts: code, and the first line of its replacement",
    "prose": "passages of War and Peace, to be continued",
    "hostile": "the same passages, sampled at temperature 1.3",
    "json": "a list of JSON records that breaks off",
    "mixture": "prose and edit transcripts, half and half in one batch",
}


def load_workload(
    name: str, source: PromptSets, encode: Encode, vocab_size: int, size: int, count: int
) -> Workload:
    """The prompts of a workload in ``count`` groups of ``size``.

    Raises:
        MissingWorkloadError: its data is not there, or so many requests cannot be halved.
    """
    wanted = size * count
    if name == "random":
        prompts = random_prompts(vocab_size, wanted)
    elif name == "sonnet":
        prompts = sonnet_prompts(encode, wanted)
    elif name == "mixture":
        if size % 2:
            raise MissingWorkloadError(f"a batch of {size} cannot be half prose and half edits")
        prose, edits = (repeated(source.kind(kind), wanted // 2) for kind in ("prose", "edit"))
        prompts = [encode(text) for pair in zip(prose, edits, strict=True) for text in pair]
    else:
        prompts = [encode(text) for text in repeated(texts_of(name, source), wanted)]
    groups = [prompts[at : at + size] for at in range(0, wanted, size)]
    return Workload(name, groups, range(0, size, 2) if name == "mixture" else range(0))


def repeated(texts: Sequence[str], count: int) -> list[str]:
    """``count`` texts at equal distances; where there are too few they come again."""
    found = spread(texts, count)
    return [found[i % len(found)] for i in range(count)]


def texts_of(name: str, source: PromptSets) -> list[str]:
    """Raises :class:`MissingWorkloadError` where the source has no such set."""
    if name == "json":
        every = [text for texts in source.sets.values() for text in texts]
        return json_prompts(source.sets.get("gsm8k") or every)
    kind = "prose" if name == "hostile" else name
    if kind in ("code", "prose", "edit"):
        return source.kind(kind)
    if kind not in source.sets:
        raise MissingWorkloadError(f"the {source.source} prompts have no {name}")
    return source.sets[kind]


def random_prompts(vocab_size: int, count: int) -> list[list[int]]:
    """Tokens drawn uniformly; the same ones in every run."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(SERVED_TOKENS[0])] for _ in range(count)]


def sonnet_prompts(encode: Encode, count: int) -> list[list[int]]:
    """Lines of the sonnets in random order, cut to their number of tokens."""
    file = data_folder() / "prompts" / "sonnet.txt"
    if not file.exists():
        raise MissingWorkloadError("sonnet.txt is not among the test data")
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    rng = random.Random(0)
    texts = ("\n".join(rng.sample(lines, min(SONNET_LINES, len(lines)))) for _ in range(count))
    return [encode(text)[: SERVED_TOKENS[0]] for text in texts]


def json_prompts(texts: Sequence[str]) -> list[str]:
    """Lists of records made from the texts, each of which breaks off where a record begins."""
    found = []
    for start in range(max(1, len(texts) - RECORDS)):
        records = [
            {"id": start + i, "text": text[:RECORD_TEXT], "words": len(text.split())}
            for i, text in enumerate(texts[start : start + RECORDS + 1])
        ]
        whole = json.dumps(records, indent=2)
        found.append(whole[: whole.rindex('"id"')])
    return found
