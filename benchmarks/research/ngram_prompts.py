"""Prompts whose answers train the embedded n-gram model: cut from what its target was trained on.

Half of them are of the code of Python's standard library, the other half of the given texts in
equal parts. None shares eight words in a row with a prompt that a benchmark or the demo uses. War
and Peace cannot be among the texts: the benchmarks' prose is all of that book.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from prompt_sets import load_prompts

from paceline_lab.train.data import read_documents

LENGTHS = (100, 200, 400)
"""Characters of a prompt, in turns."""
SHARED_WORDS = 8


def cut(text: str, count: int) -> list[str]:
    """At most ``count`` pieces at equal distances, each from the start of a line to a word's end.

    Fewer where a piece would have no two words, or reach beyond the text.
    """
    pieces = []
    for number in range(count):
        at = text.find("\n", number * len(text) // count) + 1
        piece = text[at : at + LENGTHS[number % len(LENGTHS)]].lstrip("\n")
        if at and at + max(LENGTHS) <= len(text) and len(piece.split()) > 1:
            pieces.append(piece.rsplit(None, 1)[0])
    return pieces


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """Every :data:`SHARED_WORDS` words in a row; a shorter text is one run."""
    words = text.split()
    for at in range(max(1, len(words) - SHARED_WORDS + 1)):
        yield tuple(words[at : at + SHARED_WORDS])


def without(texts: Sequence[str], others: Sequence[str]) -> list[str]:
    """The texts that share no run with the others."""
    known = {run for other in others for run in runs(other)}
    return [text for text in texts if known.isdisjoint(runs(text))]


def benchmark_prompts() -> list[str]:
    """Ours, and the public ones where they are present."""
    found = {source: load_prompts(source).sets for source in ("auto", "embedded")}
    return [text for sets in found.values() for texts in sets.values() for text in texts]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, action="append", required=True, help="may be repeated")
    parser.add_argument("--count", type=int, default=2000, help="of candidates (default: 2000)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a JSONL file")
    options = parser.parse_args(argv)
    sources = [read_documents([], stdlib=True), *(read_documents([text]) for text in options.text)]
    shares = [options.count // 2, *[options.count // 2 // len(options.text)] * len(options.text)]
    candidates = [
        piece
        for documents, share in zip(sources, shares, strict=True)
        for piece in cut("\n".join(each.text for each in documents), share)
    ]
    kept = without(candidates, benchmark_prompts())
    rows = (json.dumps({"prompt": text}) + "\n" for text in kept)
    options.output.write_text("".join(rows), encoding="utf-8")
    print(f"{len(kept)} prompts; {len(candidates) - len(kept)} shared words with a benchmark's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
