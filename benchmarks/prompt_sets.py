"""The prompts that benchmarks run on, and workloads made of them as token ids.

Public sets are used where they are present: they lie outside the repository, in the folder that
``PACELINE_TEST_DATA`` names or in ``../shared/data`` beside it. Ours are the embedded ones. Of the
workloads, some are made here: prompts of a fixed number of tokens out of sonnets or at random, JSON
records that break off, and batches of which one half is prose and the other edits. Knows no engine.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness import ROOT, SOURCES

EMBEDDED = ROOT / "src" / "paceline" / "embedded" / "prompts.jsonl"
PASSAGE = 700
"""Characters of a prose prompt."""
EDIT_RANGE = (300, 1500)
"""Characters of the code that an edit transcript quotes before it changes it."""
KINDS = {
    "public": {"code": "humaneval", "prose": "prose", "edit": "edits"},
    "embedded": {"code": "code", "prose": "prose", "edit": "edit"},
}
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class PromptSets:
    """Sets of prompts by name.

    Attributes:
        source: ``public``, or ``embedded`` where those are absent.
    """

    source: str
    sets: dict[str, list[str]]

    @property
    def names(self) -> list[str]:
        """What :meth:`kind` knows."""
        return list(dict.fromkeys([*KINDS[self.source], *self.sets]))

    def kind(self, kind: str) -> list[str]:
        """The set of that name, or that stands for ``code``, ``prose`` or ``edit``."""
        return self.sets[KINDS[self.source].get(kind, kind)]


def load_prompts(source: str = "auto") -> PromptSets:
    """All sets of a source; ``auto`` prefers the public ones.

    Raises:
        ValueError: the source is unknown.
        FileNotFoundError: its files are absent.
    """
    if source not in SOURCES:
        raise ValueError(f"the source of prompts is {source!r}; allowed: {', '.join(SOURCES)}")
    folder = data_folder()
    if source == "embedded" or (source == "auto" and not folder.is_dir()):
        sets: dict[str, list[str]] = {}
        for row in _rows(EMBEDDED):
            sets.setdefault(row["kind"], []).append(row["prompt"])
        return PromptSets("embedded", sets)
    return PromptSets("public", {name: read(folder) for name, read in _PUBLIC.items()})


def data_folder() -> Path:
    configured = os.environ.get("PACELINE_TEST_DATA")
    return Path(configured) if configured else ROOT.parent / "shared" / "data"


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """``count`` items at equal distances, or all of them where there are fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _rows(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def _column(file: str, key: str) -> Callable[[Path], list[str]]:
    """The texts under one key; of the turns of a conversation the first."""

    def read(folder: Path) -> list[str]:
        values = [row[key] for row in _rows(folder / "prompts" / file)]
        return [value if isinstance(value, str) else value[0] for value in values]

    return read


def prose_passages(text: str) -> list[str]:
    """Passages that begin with a paragraph and end after a word."""
    passages, start = [], 0
    while (start := text.find("\n\n", start)) >= 0:
        passage = text[start:].lstrip("\n")[:PASSAGE] if start + PASSAGE < len(text) else ""
        if passage:
            passages.append(passage.rsplit(None, 1)[0])
        start += PASSAGE
    return passages


_EDIT = re.compile(
    r"^@@@ SEARCH: .*?@{8,}\n(?P<before>.*?)^@{8,}\n(?P<after>.*?)^@@@ REPLACE",
    re.MULTILINE | re.DOTALL,
)


def edit_transcripts(text: str) -> list[str]:
    """Each quoted piece of code with the first line of its replacement, which is to be gone on."""
    found = []
    for edit in _EDIT.finditer(text):
        before, after = edit["before"], edit["after"]
        first_line = after.split("\n", 1)[0]
        if EDIT_RANGE[0] <= len(before) <= EDIT_RANGE[1] and first_line.strip():
            found.append(edit.group()[: edit.start("after") - edit.start()] + first_line + "\n")
    return found


def questions(folder: Path) -> list[str]:
    """All that the public sets ask, further turns of conversations too."""
    found: list[str] = []
    for file, key in _QUESTIONS.values():
        for row in _rows(folder / "prompts" / file):
            found += [row[key]] if isinstance(row[key], str) else row[key]
    return found


def _corpus(file: str, cut: Callable[[str], list[str]]) -> Callable[[Path], list[str]]:
    return lambda folder: cut((folder / "corpora" / file).read_text(encoding="utf-8"))


_QUESTIONS = {
    "humaneval": ("humaneval.jsonl", "prompt"),
    "mt_bench": ("mt_bench.jsonl", "turns"),
    "spec_bench": ("spec_bench_even.jsonl", "turns"),
    "gsm8k": ("gsm8k_200.jsonl", "question"),
    "discussion": ("discussion_prompts.jsonl", "prompt"),
}
"""The file of each set of questions, and the key of their text."""
_PUBLIC: dict[str, Callable[[Path], list[str]]] = {
    **{name: _column(file, key) for name, (file, key) in _QUESTIONS.items()},
    "edits": _corpus("aider-chat-edits.txt", edit_transcripts),
    "prose": _corpus("war-and-peace.txt", prose_passages),
}


NAMES = (*KINDS["public"], *_PUBLIC)
"""Of all sets, the kinds that every source has first."""
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
