"""What trained n-gram models accept, by order and smoothing, beside prompt lookup.

The target's answers to one half of the prompts are learnt. Of those to the other half some are
predicted token by token, which is the held-out report, and all are replayed, one request at a time,
with every draft verified. Counts do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Sample, arguments, note, run_sample
from ngram_tables import ALONE, BASE, BEST, CANDIDATES, CHAIN, WITH_TEXT, arm, tables, targets_of
from prompt_sets import SOURCES, load_prompts, spread
from report import Report
from trace_sets import FOLDER, traced

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.planners import PLANNERS
from paceline.policy.cost_prior import prior_table
from paceline.proposers.ngram_model.file import read_tables
from paceline.traces import read_meta, read_traces
from paceline.training.ngram.counts import Example
from paceline.training.ngram.options import NgramTrainingConfig
from paceline.training.ngram.report import Acceptance, measure, measure_others
from paceline.training.ngram.smoothing import SMOOTHINGS
from paceline.training.ngram.train import train_ngram
from paceline.workbench.replay import ReplayResult
from paceline.workbench.simulate import Simulator

KINDS = ("code", "prose", "edit")
SHAPES = {CHAIN: (4, 0, 1)} | {
    f"tree of {nodes}": (min(8, nodes), nodes, 4) for nodes in (4, 8, 16, 32)
}
MODELS = {
    f"{order}, {smoothing}": (order, smoothing) for order in (2, 3, 4) for smoothing in SMOOTHINGS
}
LOOKUP = "prompt lookup"
MAX_BYTES = 32 << 20
HELD_OUT_TOKENS = 16_384


def configs(files: Mapping[str, str], shape: str) -> dict[str, SpeculativeConfig]:
    """Every arm: models alone, two with the request's own text, and prompt lookup."""
    size, found = SHAPES[shape], {}
    for name, file in files.items():
        for how, window in ((ALONE, 0), (WITH_TEXT, 8192)):
            if name in (BASE, BEST) or (shape == CHAIN and how == ALONE):
                config = SpeculativeConfig("ngram_model", file, *size, ngram_window=window)
                found[arm(name, how)] = config
    return found | {LOOKUP: SpeculativeConfig("prompt_lookup", None, *size)}


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


def held_out(files: Mapping[str, str], folders: Sequence[Path], tokens: int) -> list[Sample]:
    """The held-out report of every model, and of the best one's rivals, on the same texts."""
    examples = [
        Example(answer.token_ids, answer.prompt_len)
        for folder in folders
        for answer in _some(folder, tokens // len(folders))
    ]
    samples = []
    for name, file in files.items():
        note(f"held-out report: {name}")
        samples.append(
            run_sample(
                name,
                "held-out",
                lambda file=file: measure(read_tables(file), examples),
                lambda report, order=MODELS[name][0]: {
                    "num_tokens": report.num_tokens,
                    "cross_entropy": report.cross_entropy,
                    "hit_rates": report.hit_rates,
                    "hit_rate": report.hit_rates[order],
                    **_candidates(report.acceptance),
                },
            )
        )
    others = measure_others(read_tables(files[BEST]), examples)
    names = {"prompt lookup": LOOKUP, "with the text itself": arm(BEST, WITH_TEXT)}
    samples += [
        Sample(names[name], "held-out", seconds=0.0, facts=_candidates(each))
        for name, each in others.items()
    ]
    return samples


def _some(folder: Path, tokens: int) -> list[Any]:
    """The first answers, up to so many tokens."""
    answers, found = read_traces(folder), list[Any]()
    for answer in answers:
        tokens -= len(answer.token_ids) - answer.prompt_len
        if tokens < 0 and found:
            break
        found.append(answer)
    return found


def _candidates(acceptance: Acceptance) -> dict[str, float]:
    shares = zip(CANDIDATES, acceptance.accepted, strict=True)
    return {"drafted": acceptance.drafted, **dict(shares)}


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
        for shape in SHAPES
        for name, each in configs(files, shape).items()
    ]


def _no_drafts(config: SpeculativeConfig) -> Any:
    raise AssertionError(f"{config.method} needs no recorded drafts")


def rows_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Of held-out reports by model, of replays by proposer, text and shape."""
    rows: list[dict[str, Any]] = []
    for sample in samples:
        if sample.failed:
            continue
        if isinstance(sample.item, tuple):
            text, shape = sample.item
            rows.append({"proposer": sample.arm, "text": text, "shape": shape, **sample.facts})
        else:
            rows.append({"model": sample.arm, **sample.facts})
    return rows


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
        others = [other for _, other in halves.values()]
        report.samples += held_out(files, others, 1024 if options.quick else HELD_OUT_TOKENS)
        for kind, (_, other) in halves.items():
            note(f"replaying: {kind}")
            report.samples += replayed(kind, other, files)
    report.results = rows_of(report.samples)
    report.targets = targets_of(report.results)
    return report.finish(options, tables(report.results))


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
