"""The whole grid of ``never_slower.py`` by replay: the planner and the other rules without a clock.

What a target answers does not depend on drafts, so each workload is answered once, plainly, and
every arm is replayed on these answers by real proposers, its own planner and the engine's scheduler
(:mod:`paceline_lab.simulate.replay`). Steps take what the cost tables say, the host's time
included; they are measured before, for the pair of models that is named. The inflated pair computes
what the embedded one does, so that answers and drafts are the same, and only the times differ. No
noise of the machine is left in the ratios, and nothing that the tables do not know of.

Requests wait in one queue: a batch is refilled as soon as one of them ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain as flat
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import (
    PLAIN,
    Report,
    Row,
    Target,
    among,
    arguments,
    chosen,
    geometric_mean,
    note,
    number,
    table,
)
from never_slower import CONCURRENCY, NOT_SLOWER, PRE_REGISTERED, Cell, full_grid
from never_slower_arms import OURS, chains, default, pair_folders
from prompt_sets import (
    DESCRIPTIONS,
    SERVED_TOKENS,
    MissingWorkloadError,
    PromptSets,
    load_prompts,
    load_workload,
)
from proposer_sets import described
from rivals import GOODPUT, OUR_GOODPUT, RIVALS, Goodput
from trace_sets import FOLDER, MAX_MODEL_LEN, traced

from paceline.api.llm import embedded_model
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.loading.checkpoint import load_checkpoint
from paceline.planner.cost_table import CostTable
from paceline.planner.planner import PLANNERS
from paceline.profiling.profile import ProfileSettings, measure_profiles
from paceline_lab.simulate.replay import ReplayResult
from paceline_lab.simulate.setup import open_simulator
from paceline_lab.simulate.simulator import Simulator, best_of_each

CROWDS = (("1 request", 1, 1), ("2", 2, 2), ("4 or more", 4, 1 << 30))
"""Numbers of requests that are taken together."""


# --- the report -----------------------------------------------------------------------------------


def targets(rows: Sequence[Row]) -> list[Target]:
    found = []
    for pair in dict.fromkeys(row["pair"] for row in rows):
        own = [row for row in rows if row["pair"] == pair]
        slower = sum(row["arms"][OURS] < NOT_SLOWER for row in own)
        best = [row["ours_to_best"] for row in own]
        oracle = geometric_mean([row["ours_to_oracle"] for row in own])
        prose = min((row["prose_beside"] for row in own if "prose_beside" in row), default=None)
        least = "at least"
        found += [
            Target(f"{pair}: cells whose ours/plain is below {NOT_SLOWER}", slower, 0),
            Target(f"{pair}: ours / the best other arm, mean", geometric_mean(best), 1.0, least),
            Target(f"{pair}: ours / the best other arm, worst cell", min(best), 0.93, least),
            Target(f"{pair}: ours / the hindsight oracle, mean", oracle, 0.95, least),
            Target(f"{pair}: rate of prose beside edits, worst cell", prose, 0.95, least),
        ]
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    """By pair, requests and whether text is sampled: means over the workloads, and worst cells."""
    headers = ["pair", "requests", "text", "cells", "ours/plain", "worst", "ours/best", "worst"]
    headers += ["ours/oracle", "worst of ours/plain"]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        text = "sampled" if row["temperature"] else "greedy"
        groups.setdefault((row["pair"], row["requests"], text), []).append(row)
    lines = []
    for group, own in groups.items():
        gains, best = [row["arms"][OURS] for row in own], [row["ours_to_best"] for row in own]
        figures = [geometric_mean(gains), min(gains), geometric_mean(best), min(best)]
        figures.append(geometric_mean([row["ours_to_oracle"] for row in own]))
        worst = min(own, key=lambda row: row["arms"][OURS])
        shown = [number(figure, 3) for figure in figures]
        lines.append([*group, len(own), *shown, worst["workload"]])
    return [table(headers, lines), rules(rows)]


def rules(rows: Sequence[Row]) -> str:
    """Every arm over plain: the mean and the worst cell, of one request and of several."""
    headers, columns = ["arm / plain"], []
    for pair in dict.fromkeys(row["pair"] for row in rows):
        for label, least, most in CROWDS:
            own = [row for row in rows if row["pair"] == pair and least <= row["requests"] <= most]
            if own:
                headers += [f"{pair}, {label}", "worst"]
                columns.append(own)
    lines = []
    for arm in dict.fromkeys(arm for row in rows for arm in row["arms"]):
        figures = []
        for own in columns:
            gains = [row["arms"][arm] for row in own]
            figures += [geometric_mean(gains), min(gains)]
        lines.append([arm, *(number(figure, 3) for figure in figures)])
    return table(headers, lines)


PAIRS = ("embedded", "inflated")
ROLES = ("target", "draft")
MAX_TOKENS = 96
LONGEST_PROMPT = 550
FIXED = (PLAIN, *(name for name in RIVALS if name.startswith("fixed")))
"""Of these hindsight chooses the best for each prompt."""
Configs = tuple[SpeculativeConfig, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """What the steps of a pair take.

    Attributes:
        ours: who drafts for the planner.
    """

    target: CostTable
    draft: CostTable
    ours: Configs


def ours_of(pair: str) -> Configs:
    """As the command line takes them; the inflated pair's draft by the embedded one's name."""
    name = embedded_model("draft")
    if pair == "embedded":
        return default(name)
    stand_in = default("any other draft")
    return tuple(replace(config, model=name) if config.model else config for config in stand_in)


def saved(pair: str, file: Path) -> Costs:
    """The tables that an earlier result rests on."""
    tables = json.loads(file.read_text())["config"]["tables"][pair]
    return Costs(*(CostTable.from_dict(tables[role]) for role in ROLES), ours_of(pair))


def measured(pair: str, options: argparse.Namespace) -> Costs:
    note(f"measuring the steps of the {pair} pair")
    target, draft = pair_folders(pair)
    config = EngineConfig(max_num_seqs=max(options.concurrency), max_model_len=MAX_MODEL_LEN)
    settings = ProfileSettings(budget_seconds=options.profile_seconds, proposers=ours_of(pair))
    model = SpeculativeConfig("draft_model", draft)
    profiles, remarks = measure_profiles(target, config, model, settings)
    for remark in remarks:
        if "beyond the limits" not in remark:
            note(remark)
    return Costs(*(profile.table for profile in profiles), ours_of(pair))


# --- one workload ---------------------------------------------------------------------------------


@cache
def encoder() -> Any:
    tokenizer = load_checkpoint(embedded_model("target")).tokenizer
    assert tokenizer is not None
    return tokenizer


def answers(
    source: PromptSets, workload: str, temperature: float, count: int, folder: Path
) -> Path:
    """The folder of the target's answers to the prompts of a workload."""
    size = 2 if workload == "mixture" else 1
    vocab = encoder().vocab_size
    found = load_workload(workload, source, encoder().encode, vocab, size, count // size)
    prompts = [ids[-LONGEST_PROMPT:] for ids in flat.from_iterable(found.groups)]
    served = workload in ("sonnet", "random")
    tokens = SERVED_TOKENS[1] if served else MAX_TOKENS
    return traced(f"{workload}-{temperature:g}", prompts, tokens, temperature, folder)


def arms(simulator: Simulator, ours: Configs) -> Iterator[tuple[str, ReplayResult]]:
    yield PLAIN, simulator.plain()
    drafts = chains(embedded_model("draft"))
    for name, make in RIVALS.items():
        yield name, simulator.run(drafts, lambda cost, *_, make=make: make(cost))
    for name, configs in ((GOODPUT, drafts), (OUR_GOODPUT, ours)):
        yield name, simulator.run(configs, lambda cost, _: Goodput(cost))
    yield OURS, simulator.run(ours, PLANNERS["auto"])


def prose_rate(result: ReplayResult) -> float:
    """Mean tokens per millisecond of the requests in even places, which are prose in mixtures."""
    return fmean(sum(each.emitted) / each.wall_ms for each in result.traces[::2])


def cell_row(simulator: Simulator, ours: Configs, label: Mapping[str, Any]) -> dict[str, Any]:
    """Every arm over plain decoding, and ours over the best of them; times are of whole runs."""
    found = dict(arms(simulator, ours))
    plain_ms, ours_ms = found[PLAIN].ms, found[OURS].ms
    others = {name: result.ms for name, result in found.items() if name != OURS}
    best = min(others, key=others.__getitem__)
    # Who shares a step has one configuration, so prompts have their own only one at a time.
    fixed = [found[name] for name in FIXED]
    alone = label["requests"] == 1
    oracle_ms = best_of_each(fixed).ms if alone else min(each.ms for each in fixed)
    beside = {}
    if label["workload"] == "mixture" and not alone:
        beside["prose_beside"] = prose_rate(found[OURS]) / prose_rate(found[PLAIN])
    return {
        **label,
        **beside,
        "plain_tokens_per_second": found[PLAIN].total("num_emitted_tokens") / plain_ms * 1e3,
        "arms": {name: plain_ms / result.ms for name, result in found.items()},
        "best_other": best,
        "ours_to_best": others[best] / ours_ms,
        "ours_to_oracle": oracle_ms / ours_ms,
        "acceptance_length": found[OURS].total("num_emitted_tokens")
        / found[OURS].total("num_steps"),
    }


def run_workload(
    folder: Path, cells: Sequence[Cell], costs: Mapping[str, Costs], report: Report
) -> None:
    """All cells of one workload at one temperature, for every pair, on answers in a folder."""
    workload, _, temperature = cells[0]
    everybody = [config for each in costs.values() for config in each.ours]
    everybody += chains(embedded_model("draft"))
    wanted = [config for config in everybody if config.needs_forwards]
    config = EngineConfig(max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    base = open_simulator(folder, embedded_model("target"), config, wanted).simulator
    for pair, each in costs.items():
        tables = {embedded_model("draft"): each.draft}
        for _, requests, _ in cells:
            label = {"pair": pair, "workload": workload, "requests": requests}
            note(f"{label}, temperature {temperature:g}")
            limits = replace(base.config, max_num_seqs=requests)
            simulator = replace(base, table=each.target, draft_tables=tables, config=limits)
            row = cell_row(simulator, each.ours, {**label, "temperature": temperature})
            report.results.append(row)


# --- the program ----------------------------------------------------------------------------------


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument("--pairs", type=among(PAIRS), default=PAIRS)
    parser.add_argument("--workloads", type=among(DESCRIPTIONS), default=tuple(DESCRIPTIONS))
    parser.add_argument("--concurrency", type=among(CONCURRENCY), default=CONCURRENCY)
    parser.add_argument("--traces", type=Path, default=FOLDER, help="where answers are kept")
    parser.add_argument("--costs", type=Path, help="a result whose tables are taken, not measured")
    parser.sized("--num-prompts", 32, 8, "of each workload")
    parser.sized("--profile-seconds", 60.0, 5.0, "of a pair")
    options = parser.parse_args(argv)
    if options.quick and options.pairs == PAIRS:
        options.pairs = PAIRS[:1]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    source = load_prompts(options.prompts)
    costs = {
        pair: saved(pair, options.costs) if options.costs else measured(pair, options)
        for pair in options.pairs
    }
    config = {"prompts": source.source, **chosen(options, "quick", "num_prompts")}
    config["tables"] = {
        pair: {"target": each.target.to_dict(), "draft": each.draft.to_dict()}
        for pair, each in costs.items()
    }
    config["ours"] = {pair: described(each.ours) for pair, each in costs.items()}
    report = Report("never_slower_replayed", config)
    groups: dict[tuple[str, float], list[Cell]] = {}
    for cell in PRE_REGISTERED if options.quick else full_grid():
        if cell[0] in options.workloads and cell[1] in options.concurrency:
            groups.setdefault((cell[0], cell[2]), []).append(cell)
    left_out: dict[str, str] = {}
    for cells in groups.values():
        try:
            folder = answers(source, *cells[0][::2], options.num_prompts, options.traces)
            run_workload(folder, cells, costs, report)
        except MissingWorkloadError as error:
            left_out[cells[0][0]] = str(error)
    report.config["left_out"] = left_out
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
