"""Host time of the `suffix` proposer per request and step, and the memory that its automata take.

A request goes through a text, one to four tokens a step, with its own context alone and beside a
full store of earlier answers, which are other pieces of the same text. Only the proposer is timed:
``observe`` and ``propose``. Between the steps of a second series other memory is written, as a
forward does, so that the processor's caches hold little of the automata.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import Sample, arguments, names, note, run_sample
from prompt_sets import data_folder
from report import Report, Target, number, table

from paceline.config import SpeculativeConfig
from paceline.models.embedded import embedded_model
from paceline.proposers.base import DraftBudget
from paceline.proposers.suffix import SuffixProposer
from paceline.request import TARGET_ORIGIN, FinishReason, Request, VerifyResult
from paceline.sampling_params import SamplingParams
from paceline.training.data import read_documents, tokenize
from paceline.training.model_files import load_tokenizer

CONTEXT = 32_768
ANSWER = 2048
"""Tokens of an earlier answer."""
NODES, DEPTH = 16, 16
TEXTS = {"code": None, "prose": "war-and-peace.txt", "edits": "aider-chat-edits.txt"}
"""A corpus of the shared data, or Python's own standard library."""
OTHER_MEMORY = 16 << 20
"""Bytes that are written between the steps of the second series."""
WANTED_US = 20.0


@dataclass(frozen=True, slots=True)
class Case:
    """One request's way through a text.

    Attributes:
        shared: tokens of earlier answers.
        has_forwards: other memory is written between the steps.
    """

    text: str
    shared: int
    has_forwards: bool


def read_text(name: str) -> list[int]:
    """The tokens of a text, by the embedded target's tokenizer."""
    corpus = TEXTS[name]
    files = () if corpus is None else (str(data_folder() / "corpora" / corpus),)
    documents = read_documents(files, (), corpus is None)
    tokens = tokenize(documents, load_tokenizer(embedded_model("target")))
    return [int(token) for document in tokens for token in document.tolist()]


def measure(tokens: Sequence[int], case: Case, steps: int) -> dict[str, Any]:
    """Microseconds of every step, seconds of reading, and bytes."""
    ahead = CONTEXT + 4 * steps
    proposer = SuffixProposer(SpeculativeConfig("suffix", None, DEPTH, NODES, 4))
    earlier = tokens[:-ahead][: case.shared]
    filling = _fill(proposer, earlier)
    coming = tokens[-ahead:]
    request = Request(0, list(coming[:CONTEXT]), CONTEXT, SamplingParams(), 0, ahead + 1)
    budget = DraftBudget([NODES], [DEPTH])
    began = time.perf_counter()
    proposer.propose([request], budget)
    reading = time.perf_counter() - began
    times, nodes, other = [], 0, np.zeros(OTHER_MEMORY, np.uint8)
    for step in range(steps):
        start = len(request.token_ids)
        committed = coming[start : start + 1 + step % 4]
        request.token_ids += committed
        result = VerifyResult((0,), committed, [TARGET_ORIGIN] * len(committed))
        if case.has_forwards:
            other += 1
        began = time.perf_counter()
        proposer.observe(request, result)
        (tree,) = proposer.propose([request], budget)
        times.append((time.perf_counter() - began) * 1e6)
        nodes += len(tree)
    own = proposer._texts[request.request_id].automaton.num_bytes
    shared = sum(each.num_bytes for each in proposer._shared.automata(request.cache_salt))
    return {
        "shared_tokens": len(earlier),
        "us": [round(each, 1) for each in times],
        "nodes": nodes / steps,
        "read_us_per_token": reading / CONTEXT * 1e6,
        "keep_us_per_token": filling / len(earlier) * 1e6 if earlier else None,
        "bytes_per_token": own / len(request.token_ids),
        "shared_bytes_per_token": shared / len(earlier) if earlier else None,
    }


def _fill(proposer: SuffixProposer, tokens: Sequence[int]) -> float:
    """Let requests end that said these tokens; returns the seconds that it took."""
    began = time.perf_counter()
    for index, start in enumerate(range(0, len(tokens), ANSWER), start=1):
        answer = list(tokens[start : start + ANSWER])
        request = Request(index, answer, 0, SamplingParams(), 0, ANSWER)
        request.finish_reason = FinishReason.STOP
        proposer.finish(request)
    return time.perf_counter() - began


def row_of(sample: Sample) -> dict[str, Any]:
    """One row of the results: the sample's figures, its times as quantiles."""
    case = sample.item
    assert isinstance(case, Case)
    row = {"text": case.text, "has_forwards": case.has_forwards}
    if sample.failed:
        return row | {"error": sample.error}
    ranked = sorted(sample.facts["us"])
    figures = {key: value for key, value in sample.facts.items() if key != "us"}
    quantiles = {"p10_us": ranked[len(ranked) // 10], "p90_us": ranked[len(ranked) * 9 // 10]}
    return row | figures | {"median_us": statistics.median(ranked)} | quantiles


def targets_of(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    return [
        Target(
            f"{row['text']}, {row.get('shared_tokens', 0)} shared tokens: microseconds per step",
            row.get("median_us"),
            WANTED_US,
        )
        for row in rows
        if not row["has_forwards"]
    ]


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    headers = ["text", "shared tokens", "caches", "median us", "p10", "p90", "nodes"]
    headers += ["reading, us/token", "keeping, us/token", "bytes/token", "shared bytes/token"]
    lines = [
        [
            row["text"],
            row.get("shared_tokens", "-"),
            "written over" if row["has_forwards"] else "kept",
            *(number(row.get(key), 1) for key in ("median_us", "p10_us", "p90_us", "nodes")),
            *(number(row.get(key)) for key in ("read_us_per_token", "keep_us_per_token")),
            *(number(row.get(key), 0) for key in ("bytes_per_token", "shared_bytes_per_token")),
        ]
        for row in rows
    ]
    return [table(headers, lines)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--texts", type=names, help=f"some of {', '.join(TEXTS)}")
    parser.add_argument("--shared", type=int, help="tokens of earlier answers (default: all kept)")
    parser.add_argument("--steps", type=int, help="of each series (default: 1500, quick: 100)")
    options = parser.parse_args(argv)
    found = [name for name, file in TEXTS.items() if file is None or data_folder().is_dir()]
    texts = options.texts or found
    if unknown := set(texts) - set(found):
        parser.error(f"there is no text {sorted(unknown)[0]!r}; allowed are {', '.join(found)}")
    full = SpeculativeConfig("suffix").suffix_decoding_max_cached_tokens
    shared = options.shared if options.shared is not None else (1 << 16 if options.quick else full)
    steps = options.steps or (100 if options.quick else 1500)
    report = Report("suffix_time", _described(options, shared, steps))
    for name in texts:
        note(f"reading: {name}")
        tokens = read_text(name)
        for case in (Case(name, s, f) for s in (0, shared) for f in (False, True)):
            run = lambda c=case, t=tokens: measure(t, c, steps)  # noqa: E731
            report.samples.append(run_sample("suffix", case, run, dict))
    report.results = [row_of(sample) for sample in report.samples]
    report.targets = targets_of(report.results)
    return report.finish(options, tables(report.results))


def _described(options: argparse.Namespace, shared: int, steps: int) -> dict[str, Any]:
    return {
        "context": CONTEXT,
        "nodes": NODES,
        "shared": shared,
        "steps": steps,
        "other_memory": OTHER_MEMORY,
        "quick": options.quick,
    }


if __name__ == "__main__":
    sys.exit(main())
