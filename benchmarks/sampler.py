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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import arguments, chosen, note, numbers, run_sample
from report import Report, Row, Target, grid, table

from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.sampling import native
from paceline.sampling.logit_edits import SamplingRow
from paceline.sampling.sampler import rank_candidates, sample_tokens

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
        return measure(lambda: rank_candidates(values, [row], RANKED))
    return measure(lambda: sample_tokens(values, [row]))


ARMS = {**({"native": native.kernels} if native.kernels else {}), "numpy": None}


def run_case(report: Report, case: Case, kind: str, vocab: int) -> None:
    """For each arm a raw sample; of both a row of medians."""
    label = {"case": case.name, "logits": kind, "vocab": vocab}
    medians = {}
    for arm, kernels in ARMS.items():
        native.kernels = kernels
        run = partial(run_cell, case, kind, vocab)
        sample = run_sample(arm, case.name, run, lambda us: {"us": us})
        us = [round(value, 2) for value in sample.facts.get("us", ())]
        kept = {"error": sample.error} if sample.failed else {"us": us}
        report.samples.append({**label, "arm": arm, **kept})
        medians |= {f"{arm}_us": statistics.median(us)} if us else {}
    native.kernels = ARMS.get("native")
    report.results.append({**label, **medians})


def targets(results: Sequence[Row]) -> list[Target]:
    return [
        Target(f"us per row, {row['case']}, {row['vocab']} tokens", row.get("native_us"), limit)
        for row in results
        if row["logits"] == "text" and (limit := LIMITS.get(row["vocab"]))
    ]


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        ("case", "case"),
        ("logits", "logits"),
        ("vocabulary", "vocab"),
        ("native", "native_us", 1),
        ("numpy", "numpy_us", 1),
    )
    return [table(*grid(results, *columns)) + "\n(medians, us)"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.sized("--vocabularies", VOCABULARIES, VOCABULARIES[:2], "sizes", type=numbers)
    options = parser.parse_args(argv)
    config = {
        **chosen(options, "quick", "vocabularies"),
        "level": native.kernels.isa() if native.kernels else None,
        "request_tokens": REQUEST_TOKENS,
        "cases": {case.name: case.options for case in CASES},
    }
    report = Report("sampler", config)
    for vocab in options.vocabularies:
        for kind in ("text", "flat"):
            note(f"vocabulary {vocab}, {kind}")
            for case in CASES:
                run_case(report, case, kind, vocab)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
