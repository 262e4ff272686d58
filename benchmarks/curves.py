"""One planner on many machines: real answers replayed on published cost curves and on ours.

The embedded pair's answers and drafts are the same everywhere, so what differs between the machines
is only what a step costs: how many nodes the planner verifies there, and what that is worth against
fixed lengths, the p_min cut-off, the rule "P(whole draft) x speed", and hindsight. Nothing is timed
but our own curves; speed-ups are of decoding, without the reading of the prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from curves_report import (
    BEST_FIXED,
    BEST_STEPS,
    LENGTHS,
    LONGEST,
    OURS,
    OURS_TREES,
    PLAIN,
    RULES,
    fixed,
    tables,
    targets,
)
from harness import arguments, names, note, run_sample
from machine_curves import Curve, describe, measured, published
from peers_models import hugging_face
from prompt_sets import SOURCES, data_folder, load_prompts, spread
from proposer_sets import chain, draft_model, tree
from report import Report
from rivals import RIVALS, FixedLength
from trace_sets import FOLDER, MAX_MODEL_LEN, traced
from watched import Watched, facts, ratios, watch

from paceline.config import EngineConfig, parse_speculative_config
from paceline.engine.planners import PLANNERS, MakePlanner
from paceline.llm import embedded_model
from paceline.workbench.replay import ReplayResult
from paceline.workbench.simulate import Simulator, best_of_each
from paceline.workbench.simulate_setup import open_simulator

PAIRS = ("embedded", "0.5b")
KINDS = ("code", "prose", "edit")
PROPOSERS: dict[str, Mapping[str, Any]] = {
    "draft_model": draft_model(LONGEST),
    "prompt_lookup": chain(LONGEST),
}
TREES = {"draft_model": tree(draft_model(LONGEST), 16, 4), "prompt_lookup": tree(chain(16), 16, 4)}


def curves_of(options: argparse.Namespace) -> list[Curve]:
    path = data_folder() / "cost_curves.json"
    found = published(path) if path.exists() else []
    if not found:
        note(f"there are no published curves at {path}")
    return found + [own(pair, options) for pair in options.ours]


def own(pair: str, options: argparse.Namespace) -> Curve:
    """The embedded pair's curve, or that of the pair that is as large as a real one."""
    roles = ("target", "draft")
    folders = [embedded_model(role) for role in roles]
    if pair != "embedded":
        folders = [str(hugging_face(pair, role)) for role in roles]
    name = f"this machine, {pair} pair"
    return measured(name, *folders, options.device, options.profile_seconds)


# --- the arms -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Cell:
    """Everything that is replayed of one text with one proposer on one curve."""

    simulator: Simulator
    proposer: str
    watched: Watched | None = None

    def run(self, source: Mapping[str, Any], make: MakePlanner) -> ReplayResult:
        result, self.watched = watch(self.simulator, parse_speculative_config(source), make)
        return result

    def arms(self) -> Iterator[tuple[str, Callable[[], ReplayResult]]]:
        """Names and replays, hindsight last."""
        chains, trees = PROPOSERS[self.proposer], TREES[self.proposer]
        uncut = {**chains, "min_accept_prob": 0.0}
        plain = self.simulator.plain()
        known = [plain]

        def fixed_length(length: int) -> ReplayResult:
            known.append(self.run(uncut, lambda *_: FixedLength(length)))
            return known[-1]

        def steps() -> ReplayResult:
            configs = [*parse_speculative_config(uncut), *parse_speculative_config(trees)]
            return self.simulator.best_steps(configs)

        yield PLAIN, lambda: plain
        for length in LENGTHS:
            yield fixed(length), lambda length=length: fixed_length(length)
        for rule in RULES:
            yield rule, lambda rule=rule: self.run(chains, lambda cost, *_: RIVALS[rule](cost))
        yield OURS, lambda: self.run(chains, PLANNERS["auto"])
        yield OURS_TREES, lambda: self.run(trees, PLANNERS["auto"])
        yield BEST_FIXED, lambda: best_of_each(known)
        yield BEST_STEPS, steps


def run_cell(cell: Cell, label: Mapping[str, Any], report: Report) -> None:
    """Replay every arm; times in the results are of decoding."""
    found: dict[str, Mapping[str, Any]] = {}
    nodes: dict[str, dict[str, Any]] = {}
    prompt_ms = 0.0
    for arm, run in cell.arms():
        cell.watched = None
        sample = run_sample(arm, str(label), run, facts)
        report.samples.append({"arm": arm, **label, "error": sample.error, **sample.facts})
        if sample.failed:
            report.results.append({**label, "arm": arm, "error": sample.error})
            continue
        found[arm] = sample.facts
        if cell.watched is not None:
            prompt_ms = cell.watched.prompt_ms  # the same in all arms
            nodes[arm] = {"nodes": dict(sorted(cell.watched.nodes.items()))}
    for arm, each in found.items():
        figures = ratios(each, found[PLAIN], prompt_ms)
        report.results.append({**label, "arm": arm, **figures, **nodes.get(arm, {})})


def run_all(options: argparse.Namespace, curves: Sequence[Curve], report: Report) -> None:
    source = load_prompts(options.prompts)
    report.config["prompts"] = source.source
    wanted = [
        config
        for each in (PROPOSERS["draft_model"], TREES["draft_model"])
        for config in parse_speculative_config({**each, "min_accept_prob": 0.0})
    ]
    config = EngineConfig(device=options.device, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    draft = embedded_model("draft")
    for kind in KINDS:
        texts = spread(source.kind(kind), options.num_prompts)
        folder = traced(kind, texts, options.max_tokens, 0.0, options.traces)
        base = open_simulator(folder, embedded_model("target"), config, wanted).simulator
        for curve in curves:
            note(f"{kind}: {curve.name}")
            tables = {} if curve.draft is None else {draft: curve.draft}
            simulator = replace(base, table=curve.target, draft_tables=tables)
            for proposer in PROPOSERS if tables else ("prompt_lookup",):
                label = {"curve": curve.name, "text": kind, "proposer": proposer}
                run_cell(Cell(simulator, proposer), label, report)


# --- the program ----------------------------------------------------------------------------------


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--num-prompts", type=int, help="of each kind (default: 12, quick: 3)")
    parser.add_argument("--max-tokens", type=int, help="per prompt (default: 160, quick: 48)")
    parser.add_argument("--traces", type=Path, default=FOLDER, help="where answers are kept")
    parser.add_argument(
        "--ours",
        type=names,
        help=f"own pairs to measure, of {', '.join(PAIRS)} (default: both, quick: embedded)",
    )
    parser.add_argument(
        "--profile-seconds", type=float, help="for each own curve (default: 20, quick: 3)"
    )
    options = parser.parse_args(argv)
    options.num_prompts = options.num_prompts or (3 if options.quick else 12)
    options.max_tokens = options.max_tokens or (48 if options.quick else 160)
    options.profile_seconds = options.profile_seconds or (3.0 if options.quick else 20.0)
    if options.ours is None:
        options.ours = PAIRS[:1] if options.quick else PAIRS
    unknown = set(options.ours) - set(PAIRS)
    if unknown:
        parser.error(f"--ours has {', '.join(sorted(unknown))}; allowed are {', '.join(PAIRS)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    curves = curves_of(options)
    report = Report(
        "curves",
        {
            "model": "embedded pair, greedy",
            "quick": options.quick,
            "num_prompts": options.num_prompts,
            "max_tokens": options.max_tokens,
            "curves": {curve.name: describe(curve) for curve in curves},
        },
    )
    run_all(options, curves, report)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
