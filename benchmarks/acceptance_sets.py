"""Whose answers ``acceptance.py`` replays: six sets of prompts at two temperatures, in halves.

The answers to one half of a set's prompts are what the n-gram model learns; those to the other half
judge. Plain decoding has answered both; JSON is answered under its schemas.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from prompt_sets import PromptSets, spread
from structured_sets import SCHEMAS, prompts
from trace_sets import answer_params, traced

from paceline import SamplingParams, StructuredOutputs
from paceline.traces import Trace, read_traces

TEMPERATURES = (0.0, 0.8)
PUBLIC = ("humaneval", "mt_bench", "spec_bench", "edits", "prose")
JSON = "json"


@dataclass(frozen=True, slots=True)
class Cell:
    """A set of prompts at a temperature.

    Attributes:
        learnt, judged: folders of the answers to the two halves.
        params: of the answers that judge.
    """

    name: str
    temperature: float
    learnt: Path
    judged: Path
    params: Sequence[SamplingParams]

    @property
    def label(self) -> dict[str, str | float]:
        return {"set": self.name, "temperature": self.temperature}

    def answers(self, count: int) -> list[Trace]:
        """``count`` of those that judge, at equal distances."""
        return spread(list(read_traces(self.judged)), count)


def cells_of(options: argparse.Namespace, source: PromptSets) -> list[Cell]:
    """Every set at every temperature, answered."""
    found = []
    for name in [*(PUBLIC if source.source == "public" else source.sets), JSON]:
        if options.sets and name not in options.sets:
            continue
        texts, grammars = _texts(name, source, 2 * options.num_prompts)
        found += [_cell(options, name, t, texts, grammars) for t in TEMPERATURES]
    return found


def _texts(name: str, source: PromptSets, count: int) -> tuple[list[str], list[StructuredOutputs]]:
    if name != JSON:
        return spread(source.sets[name], count), []
    pairs = list(islice(_json(count), count))
    return [text for text, _ in pairs], [grammar for _, grammar in pairs]


def _json(count: int) -> Iterator[tuple[str, StructuredOutputs]]:
    """The schemas in turns, each twice in other words, so that it is in both halves."""
    turns = -(-count // (2 * len(SCHEMAS)))
    texts = {name: prompts(name, 2 * turns) for name in SCHEMAS}
    for turn in range(turns):
        for name, schema in SCHEMAS.items():
            for text in texts[name][2 * turn : 2 * turn + 2]:
                yield text, StructuredOutputs(json=schema)


def _cell(
    options: argparse.Namespace,
    name: str,
    temperature: float,
    texts: Sequence[str],
    grammars: Sequence[StructuredOutputs],
) -> Cell:
    length = options.max_tokens
    learnt, judged = (
        traced(name, texts[at::2], length, temperature, options.traces, grammars[at::2])
        for at in (0, 1)
    )
    params = answer_params(len(texts[1::2]), length, temperature, grammars[1::2])
    return Cell(name, temperature, learnt, judged, params)
