"""Time per row of the sampler: native kernels and numpy, by vocabulary and sampling parameters.

A sample is one call for one row, so it includes what Python adds to it. Rows are generated: `text`
has the shape of a language model's logits (a broad bulk far below a few candidates), `flat` is
normal noise, in which almost every token stays in the running. The targets are about `text`.
Penalties see a request of 2,000 tokens.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import arguments, note, numbers, run_sample
from report import Report, Target, number, table

from paceline.request import Request
from paceline.runtime import native
from paceline.runtime.logit_edits import SamplingRow
from paceline.runtime.sampler import rank_candidates, sample_tokens
from paceline.sampling_params import SamplingParams

VOCABULARIES = [4096, 32_000, 152_064]
LIMITS = {32_000: 60.0, 152_064: 250.0}
RANKED = 8
REQUEST_TOKENS = 2000
SECONDS_PER_CELL = 0.5
MOST_CALLS = 400


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: bool = False


CASES = (
    Case("greedy", {"temperature": 0.0}),
    Case("no filter"),
    Case("top-p 0.95", {"top_p": 0.95}),
    Case("top-k 50", {"top_k": 50}),
    Case("min-p 0.05", {"min_p": 0.05}),
    Case("top-p 0.95, penalties", {"top_p": 0.95, "repetition_penalty": 1.1}),
    Case("8 candidates, greedy", {"temperature": 0.0}, ranks=True),
    Case("8 candidates, top-p 0.95", {"top_p": 0.95}, ranks=True),
)


def logits(kind: str, vocab: int) -> npt.NDArray[np.float32]:
    """One row, ``[1, vocab]``."""
    rng = np.random.default_rng(vocab)
    if kind == "flat":
        return rng.normal(size=(1, vocab)).astype(np.float32)
    values = rng.normal(size=(1, vocab)) * 2.5
    values[0, rng.choice(vocab, 200, replace=False)] += rng.gamma(4, 1.8, 200)
    return values.astype(np.float32)


def sampling_row(options: dict[str, Any], vocab: int) -> SamplingRow:
    tokens = np.random.default_rng(1).integers(0, vocab, REQUEST_TOKENS).tolist()
    params = SamplingParams(**{"temperature": 0.8} | options)
    return SamplingRow(Request(0, tokens, REQUEST_TOKENS // 2, params, seed=1, max_len=10**6))


def measure(call: Callable[[], Any]) -> list[float]:
    """Microseconds of single calls; the first one, which prepares the request, is left out."""
    call()
    found: list[float] = []
    end = time.perf_counter() + SECONDS_PER_CELL
    while len(found) < MOST_CALLS and (len(found) < 5 or time.perf_counter() < end):
        began = time.perf_counter()
        call()
        found.append((time.perf_counter() - began) * 1e6)
    return found


def run_cell(case: Case, kind: str, vocab: int) -> list[float]:
    values, row = logits(kind, vocab), sampling_row(case.options, vocab)
    if case.ranks:
        tensor = torch.from_numpy(values)
        return measure(lambda: rank_candidates(tensor, [row], RANKED))
    return measure(lambda: sample_tokens(values, [row]))


def arms() -> dict[str, Any]:
    found = {"native": native.kernels} if native.kernels else {}
    return {**found, "numpy": None}


def run_row(case: Case, kind: str, vocab: int) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """For each arm a raw sample, and its median."""
    chosen = native.kernels
    try:
        for arm, kernels in arms().items():
            native.kernels = kernels
            label = {"case": case.name, "logits": kind, "vocab": vocab, "arm": arm}
            sample = run_sample(
                arm, case.name, lambda: run_cell(case, kind, vocab), lambda us: {"us": us}
            )
            if sample.failed:
                yield {**label, "error": sample.error}, {}
            else:
                us = [round(value, 2) for value in sample.facts["us"]]
                yield {**label, "us": us}, {f"{arm}_us": statistics.median(us)}
    finally:
        native.kernels = chosen


def targets(results: Sequence[dict[str, Any]]) -> list[Target]:
    return [
        Target(f"us per row, {row['case']}, {row['vocab']} tokens", row.get("native_us"), limit)
        for row in results
        if row["logits"] == "text" and (limit := LIMITS.get(row["vocab"]))
    ]


def tables(results: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        [
            *(row[key] for key in ("case", "logits", "vocab")),
            *(number(row.get(f"{arm}_us"), 1) for arm in ("native", "numpy")),
        ]
        for row in results
    ]
    return [table(["case", "logits", "vocabulary", "native", "numpy"], rows) + "\n(medians, us)"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.sized("--vocabularies", VOCABULARIES, VOCABULARIES[:2], "sizes", type=numbers)
    options = parser.parse_args(argv)
    config = {
        "quick": options.quick,
        "vocabularies": options.vocabularies,
        "level": native.kernels.isa() if native.kernels else None,
        "request_tokens": REQUEST_TOKENS,
        "cases": {case.name: case.options for case in CASES},
    }
    report = Report("sampler", config)
    for vocab in options.vocabularies:
        for kind in ("text", "flat"):
            note(f"vocabulary {vocab}, {kind}")
            for case in CASES:
                result = {"case": case.name, "logits": kind, "vocab": vocab}
                for sample, median in run_row(case, kind, vocab):
                    report.samples.append(sample)
                    result.update(median)
                report.results.append(result)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
