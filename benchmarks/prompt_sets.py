"""The prompts that benchmarks run on: public sets where they are present, ours where they are not.

The public sets lie outside the repository, in the folder that ``PACELINE_TEST_DATA`` names or in
``../shared/data`` beside it. Ours are the embedded ones. Knows no model: lengths are characters.
"""

from __future__ import annotations

import json
import os
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


def _corpus(file: str, cut: Callable[[str], list[str]]) -> Callable[[Path], list[str]]:
    return lambda folder: cut((folder / "corpora" / file).read_text(encoding="utf-8"))


_PUBLIC: dict[str, Callable[[Path], list[str]]] = {
    "humaneval": _column("humaneval.jsonl", "prompt"),
    "mt_bench": _column("mt_bench.jsonl", "turns"),
    "spec_bench": _column("spec_bench_even.jsonl", "turns"),
    "gsm8k": _column("gsm8k_200.jsonl", "question"),
    "discussion": _column("discussion_prompts.jsonl", "prompt"),
    "edits": _corpus("aider-chat-edits.txt", edit_transcripts),
    "prose": _corpus("war-and-peace.txt", prose_passages),
}
