"""The best settings that ``paceline tune`` finds for pairs of models, predicted and measured.

Answers and drafts are the embedded pair's everywhere; what a step costs is a published curve, or
that of a pair on this machine. For each of them the search of ``paceline tune`` runs, and the best
setting of each proposer and of both together is kept. Those of this machine's pairs then take turns
with plain decoding on the same prompts, one request at a time, greedy, the reading of the prompts
included: the inflated pair says what the embedded one says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from curves import KINDS, PAIRS, own
from harness import Sample, arguments, names, note, take_turns
from machine_curves import Curve, describe, published
from never_slower_arms import Served, count, pair_folders, serve
from predicted import CONTROL, PLAIN, WISH, Arm, engine_of
from prompt_sets import SOURCES, data_folder, load_prompts, spread
from recommended_pairs_report import (
    HEADERS,
    cells,
    control_cells,
    measured_cells,
    predicted_cells,
    raw,
    targets,
)
from report import Report, table
from trace_sets import FOLDER, MAX_MODEL_LEN, traced

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.build import build_engine
from paceline.engine.compute_thread import COMPUTE
from paceline.engine.engine import Engine
from paceline.engine.planners import PLANNERS
from paceline.llm import embedded_model
from paceline.sampling_params import SamplingParams
from paceline.workbench.simulate import Simulator
from paceline.workbench.simulate_setup import open_simulator
from paceline.workbench.tune import Row, Tuning, tune, wanted_configs
from paceline.workbench.tune_search import Candidate

SAID = ("quick", "num_prompts", "max_tokens", "budget", "repeat", "profile_seconds")
"""Options that the document names."""


def drafts() -> dict[str, SpeculativeConfig]:
    """Who drafts beside ``suffix``."""
    return {"draft model": SpeculativeConfig("draft_model", embedded_model("draft"))}


# --- predicted ------------------------------------------------------------------------------------


def opened(options: argparse.Namespace, texts: Sequence[str]) -> Simulator:
    """Answers and drafts of the embedded pair; costs are to be put in."""
    folder = traced("pairs", texts, options.max_tokens, 0.0, options.traces)
    config = EngineConfig(device=options.device, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    return open_simulator(
        folder, embedded_model("target"), config, wanted_configs(drafts())
    ).simulator


def search(base: Simulator, curve: Curve, seconds: float) -> Tuning:
    """What ``paceline tune`` does, at a curve's costs; without a draft's, ``suffix`` alone."""
    note(f"searching: {curve.name}")
    costs = {} if curve.draft is None else {embedded_model("draft"): curve.draft}
    simulator = replace(base, table=curve.target, draft_tables=costs)
    return tune(simulator, drafts() if costs else {}, list(PLANNERS), seconds)


def best_settings(rows: Sequence[Row]) -> dict[str, Row]:
    """The best setting by who drafts, the best of all first."""
    found: dict[str, Row] = {}
    for row in rows:
        assert row.candidate is not None
        found.setdefault(row.candidate.family, row)
    return found


def predict(
    base: Simulator, curve: Curve, seconds: float, report: Report
) -> tuple[dict[str, Candidate], list[dict[str, Any]]]:
    """The best settings by who drafts, and their rows, which the report has as well."""
    tuning = search(base, curve, seconds)
    found = best_settings(tuning.rows)
    report.config["curves"][curve.name] = describe(curve) | {
        "settings": tuning.num_candidates,
        "settings_left_out": tuning.num_left_out,
        "search_seconds": tuning.seconds,
    }
    report.samples += [
        {"pair": curve.name, "who": who, "ms": [trace.ms for trace in row.result.traces]}
        for who, row in found.items()
    ]
    rows = [predicted_cells(curve.name, who, row) for who, row in found.items()]
    report.results += rows
    return {who: row.candidate for who, row in found.items() if row.candidate}, rows


# --- measured -------------------------------------------------------------------------------------


def arms_of(settings: Mapping[str, Candidate], draft: str) -> dict[str, Arm]:
    """Settings with another draft model's weights, between two plain engines."""
    arms = {PLAIN: Arm((), "fixed")}
    for who, found in settings.items():
        configs = (replace(each, model=each.model and draft) for each in found.configs)
        arms[who] = Arm(tuple(configs), found.planner)
    return arms | {CONTROL: Arm((), "fixed")}


def measure(
    pair: str,
    curve: Curve,
    settings: Mapping[str, Candidate],
    base: Simulator,
    options: argparse.Namespace,
) -> list[Sample]:
    """Plain decoding and every setting in turns on the prompts. Call it on the compute thread."""
    target, draft = pair_folders(pair)
    config = EngineConfig(
        device=options.device,
        max_num_seqs=1,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        strict=True,
    )
    built = build_engine(target, config)
    prompts = [trace.token_ids[: trace.prompt_len].tolist() for trace in base.traces]
    params = SamplingParams(max_tokens=options.max_tokens, **WISH)

    def generate(engine: Engine, item: int) -> Served:
        return serve(engine, [prompts[item]], [params])

    runs = {
        name: partial(generate, engine_of(built, arm, curve.target))
        for name, arm in arms_of(settings, draft).items()
    }
    take_turns(runs, [0], 1, count)  # to warm up
    return take_turns(runs, range(len(prompts)), options.repeat, count)


def run_pair(pair: str, base: Simulator, options: argparse.Namespace, report: Report) -> None:
    """A pair of this machine: its costs, the search, and its best settings end to end."""
    curve = own(pair, options)
    settings, rows = predict(base, curve, options.budget, report)
    note(f"measuring the settings: {curve.name}")
    samples = COMPUTE.call(partial(measure, pair, curve, settings, base, options))
    report.samples += [raw(curve.name, sample) for sample in samples]
    control = control_cells(curve.name)
    report.results.append(control)
    for row in (*rows, control):
        row |= measured_cells(samples, row["who"])


# --- the program ----------------------------------------------------------------------------------


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--num-prompts", type=int, help="of each kind (default: 6, quick: 1)")
    parser.add_argument("--max-tokens", type=int, help="per answer (default: 96, quick: 24)")
    parser.add_argument("--budget", type=float, help="seconds of a search (default: 40, quick: 4)")
    parser.add_argument("--repeat", type=int, help="of measured runs (default: 2, quick: 1)")
    parser.add_argument("--profile-seconds", type=float, help="of a pair (default: 15, quick: 2)")
    parser.add_argument(
        "--ours", type=names, default=list(PAIRS), help="pairs to measure here; empty for none"
    )
    parser.add_argument("--traces", type=Path, default=FOLDER, help="where answers are kept")
    options = parser.parse_args(argv)
    usual = {"num_prompts": (6, 1), "max_tokens": (96, 24), "budget": (40.0, 4.0)}
    for name, sizes in {**usual, "repeat": (2, 1), "profile_seconds": (15.0, 2.0)}.items():
        if getattr(options, name) is None:
            setattr(options, name, sizes[options.quick])
    if unknown := [pair for pair in options.ours if pair not in PAIRS]:
        parser.error(f"--ours: {', '.join(unknown)}; allowed are {', '.join(PAIRS)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    source = load_prompts(options.prompts)
    texts = [text for kind in KINDS for text in spread(source.kind(kind), options.num_prompts)]
    base = opened(options, texts)
    report = Report("recommended_pairs", {"prompts": source.source, "curves": {}})
    report.config |= {name: getattr(options, name) for name in SAID}
    path = data_folder() / "cost_curves.json"
    for curve in published(path) if path.exists() else []:
        predict(base, curve, options.budget, report)
    for pair in options.ours:
        run_pair(pair, base, options, report)
    report.targets = targets(report.results)
    return report.finish(options, [table(HEADERS, [cells(row) for row in report.results])])


if __name__ == "__main__":
    sys.exit(main())
