"""How much of what each proposer drafts the target takes, alone and merged, on six kinds of text.

Replays count: a fixed number of nodes in every step, chosen by calibrated estimates, on answers
that plain decoding gave. Counts do not depend on the machine's speed. In an engine with real drafts
the same answers have to come out, token for token. ``--times`` measures what depends on the
machine, and nothing else: host time, and what trees of several sizes cost and bring.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import acceptance_report
import acceptance_times
from acceptance_engine import answered, open_llm
from acceptance_replays import MAX_BYTES, ORDER, over_all, raw, replayed, row_of, train
from acceptance_sets import Cell, cells_of
from harness import Sample, arguments, names, note
from prompt_sets import SOURCES, load_prompts
from proposer_sets import MERGED, NODES, described, for_acceptance
from report import Report
from trace_sets import FOLDER

CHECKED = ("draft_model", MERGED)
"""Run in the engine as well."""


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--sets", type=names, help="only these sets of prompts")
    parser.add_argument("--proposers", type=names, help="only these, by the names in the table")
    parser.add_argument("--num-prompts", type=int, help="that judge a set (default: 16, quick: 2)")
    parser.add_argument("--max-tokens", type=int, help="per prompt (default: 128, quick: 48)")
    parser.add_argument("--times", action="store_true", help="measure times, for a quiet machine")
    parser.add_argument("--parallel-draft", type=Path, help="folder of a parallel draft, to time")
    parser.add_argument("--traces", type=Path, default=FOLDER, help="where answers are kept")
    options = parser.parse_args(argv)
    options.num_prompts = options.num_prompts or (2 if options.quick else 16)
    options.max_tokens = options.max_tokens or (48 if options.quick else 128)
    known = for_acceptance()
    for name in options.proposers or ():
        if name not in known:
            parser.error(f"no proposer is called {name!r}; there are {', '.join(known)}")
    options.proposers = options.proposers or list(known)
    return options


def config_of(options: argparse.Namespace, source: str) -> dict[str, Any]:
    return {
        "model": "embedded target",
        "prompts": source,
        "quick": options.quick,
        "num_prompts": options.num_prompts,
        "max_tokens": options.max_tokens,
        "nodes": NODES,
        "ngram_model": {"order": ORDER, "max_bytes": MAX_BYTES, "learnt_prompts": "as many others"},
        "suffix": "knows earlier answers of the same set and temperature; no prompt comes twice",
        "json": "answered under its schemas; replays know nothing of them",
        "proposers": {name: described(c) for name, c in for_acceptance().items()},
    }


def run_replays(
    options: argparse.Namespace, cells: Sequence[Cell], ngram: str, report: Report
) -> None:
    everything: list[Sample] = []
    for cell in cells:
        note(f"replaying: {cell.name}, temperature {cell.temperature}")
        samples = replayed(cell, ngram, options.proposers, options.device)
        report.samples += [raw(sample, cell.label) for sample in samples]
        report.results += [row_of(sample, cell.label) for sample in samples]
        everything += samples
    report.results += over_all(everything)


def run_engine(
    options: argparse.Namespace, cells: Sequence[Cell], ngram: str, report: Report
) -> None:
    configs = for_acceptance(NODES, ngram)
    arms = [name for name in CHECKED if name in options.proposers]
    with open_llm(options.device) as llm:
        for cell in cells:
            note(f"in the engine: {cell.name}, temperature {cell.temperature}")
            for name in arms:
                row = answered(llm, cell, configs[name], NODES, max(1, options.num_prompts // 4))
                report.results.append({**cell.label, "arm": name, **row})
                if "error" in row:
                    report.samples.append({"arm": name, **cell.label, "error": row["error"]})


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    source = load_prompts(options.prompts)
    cells = cells_of(options, source)
    with tempfile.TemporaryDirectory() as place:
        ngram = train(cells, Path(place) / "answers.ngram")
        if options.times:
            report = Report("acceptance_times", config_of(options, source.source))
            acceptance_times.run(options, cells, ngram, report)
            return report.finish(options, acceptance_times.tables(report.results))
        report = Report("acceptance", config_of(options, source.source))
        run_replays(options, cells, ngram, report)
        run_engine(options, cells, ngram, report)
    report.targets = acceptance_report.targets(report.results)
    return report.finish(options, acceptance_report.tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
