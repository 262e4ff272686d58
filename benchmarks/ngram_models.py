"""What trained n-gram models accept, by order and smoothing, beside prompt lookup.

The target's answers to one half of the prompts are learnt; those to the other half are replayed,
one request at a time, with every draft verified. Counts do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Sample, arguments, note, run_sample
from prompt_sets import SOURCES, load_prompts, spread
from report import Report, Target, number, table
from trace_sets import FOLDER, traced

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.policy.cost_prior import prior_table
from paceline.training.ngram.options import NgramTrainingConfig
from paceline.training.ngram.train import train_ngram
from paceline.workbench.replay import ReplayResult
from paceline.workbench.simulate import PLANNERS, Simulator
from paceline.workbench.traces import read_meta, read_traces

KINDS = ("code", "prose", "edit")
SHAPES = {"chain of 4": (4, 0, 1), "tree of 16": (8, 16, 4)}
MODELS = {
    "order 2, stupid back-off": (2, "stupid-backoff"),
    "order 4, stupid back-off": (4, "stupid-backoff"),
    "order 4, Kneser-Ney": (4, "modified-kneser-ney"),
}
BASE, BEST = "order 2, stupid back-off, alone", "order 4, Kneser-Ney, with the text"
LOOKUP = "prompt lookup"
MAX_BYTES = 32 << 20


def configs(files: Mapping[str, str], shape: tuple[int, int, int]) -> dict[str, SpeculativeConfig]:
    """Every arm: each model alone and with the request's own text, and prompt lookup."""
    found = {}
    for name, file in files.items():
        for how, window in (("alone", 0), ("with the text", 8192)):
            config = SpeculativeConfig("ngram_model", file, *shape, ngram_window=window)
            found[f"{name}, {how}"] = config
    return found | {LOOKUP: SpeculativeConfig("prompt_lookup", None, *shape)}


def train(folders: Sequence[Path], place: Path) -> dict[str, str]:
    """The files of all models."""
    files = {}
    for name, (order, smoothing) in MODELS.items():
        note(f"training: {name}")
        files[name] = str(place / f"{order}-{smoothing}.ngram")
        traces = tuple(map(str, folders))
        train_ngram(
            NgramTrainingConfig(
                output=files[name],
                traces=traces,
                order=order,
                smoothing=smoothing,
                max_bytes=MAX_BYTES,
                held_out_tokens=0,
            )
        )
    return files


def counted(result: ReplayResult) -> dict[str, int]:
    names = ("num_steps", "num_draft_tokens", "num_accepted_tokens")
    return {name: result.total(name) for name in names}


def replayed(kind: str, folder: Path, files: Mapping[str, str]) -> list[Sample]:
    traces, config = list(read_traces(folder)), EngineConfig(max_num_seqs=1)
    simulator = Simulator(traces, read_meta(folder), prior_table(), {}, _no_drafts, config)
    return [
        run_sample(
            name,
            (kind, shape),
            lambda each=each: simulator.run((each,), PLANNERS["fixed"]),
            counted,
        )
        for shape, size in SHAPES.items()
        for name, each in configs(files, size).items()
    ]


def _no_drafts(config: SpeculativeConfig) -> Any:
    raise AssertionError(f"{config.method} needs no recorded drafts")


def rows_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [
        {
            "proposer": sample.arm,
            "text": sample.item[0],
            "shape": sample.item[1],
            "accepted_per_step": sample.facts["num_accepted_tokens"] / sample.facts["num_steps"],
            **sample.facts,
        }
        for sample in samples
        if not sample.failed
    ]


def targets_of(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    found = {(r["proposer"], r["text"], r["shape"]): r["accepted_per_step"] for r in rows}
    places = dict.fromkeys((row["text"], row["shape"]) for row in rows)
    return [
        Target(
            f"{text}, {shape}: accepted per step, {BEST} / {BASE}",
            found[BEST, text, shape] / found[BASE, text, shape],
            1.5,
            "at least",
        )
        for text, shape in places
        if {(BEST, text, shape), (BASE, text, shape)} <= {*found}
    ]


def view(rows: Sequence[Mapping[str, Any]]) -> str:
    places = list(dict.fromkeys((row["text"], row["shape"]) for row in rows))
    found = {(r["proposer"], r["text"], r["shape"]): r["accepted_per_step"] for r in rows}
    lines = [
        [name, *(number(found.get((name, *place))) for place in places)]
        for name in dict.fromkeys(row["proposer"] for row in rows)
    ]
    return table(["accepted per step", *(f"{t}, {s}" for t, s in places)], lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--num-prompts", type=int, help="of each kind (default: 80, quick: 4)")
    parser.add_argument("--max-tokens", type=int, help="per answer (default: 256, quick: 64)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--traces", type=Path, default=FOLDER, help="where answers are kept")
    options = parser.parse_args(argv)
    num_prompts = options.num_prompts or (4 if options.quick else 80)
    max_tokens = options.max_tokens or (64 if options.quick else 256)
    source = load_prompts(options.prompts)
    halves: dict[str, list[Path]] = {}
    for kind in KINDS:
        texts = spread(source.kind(kind), 2 * num_prompts)
        halves[kind] = [
            traced(kind, half, max_tokens, options.temperature, options.traces)
            for half in (texts[::2], texts[1::2])
        ]
    report = Report("ngram_models", _described(options, source.source, num_prompts, max_tokens))
    with tempfile.TemporaryDirectory() as place:
        files = train([learnt for learnt, _ in halves.values()], Path(place))
        for kind, (_, other) in halves.items():
            note(f"replaying: {kind}")
            report.samples += replayed(kind, other, files)
    report.results = rows_of(report.samples)
    report.targets = targets_of(report.results)
    return report.finish(options, [view(report.results)])


def _described(
    options: argparse.Namespace, source: str, num_prompts: int, max_tokens: int
) -> dict[str, Any]:
    return {
        "prompts": source,
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
        "temperature": options.temperature,
        "max_bytes": MAX_BYTES,
        "shapes": {name: list(shape) for name, shape in SHAPES.items()},
        "quick": options.quick,
    }


if __name__ == "__main__":
    sys.exit(main())
