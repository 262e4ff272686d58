"""``paceline simulate``: what speculation would bring on traces, with every cost known.

Owns the order of the rows and how they are shown; replays are
:mod:`paceline_lab.simulate.simulator`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli.model_argument import model_and_file
from paceline.cli.options import (
    JSON_HELP,
    EngineOptions,
    SpeculationOptions,
    argument,
    option,
)
from paceline.cli.report import COUNTERS, Figures
from paceline.cli.settings import engine_options, speculative_config
from paceline.cli.terminal import Screen, printable, table
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.checks import check_number
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.profiling.profile import Profile
    from paceline_lab.simulate.replay import ReplayResult
    from paceline_lab.simulate.setup import Opened
    from paceline_lab.simulate.simulator import Configs, Simulator


PLAIN, BEST_FIXED, BEST_STEPS = "plain", "best fixed of each prompt", "best drafts of each step"
UNPRICED = " without expert prices"
MOST_REQUESTS = 4096
"""At a time, as in an engine."""
Rows = dict[str, "ReplayResult"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SimulateOptions(EngineOptions, SpeculationOptions):
    """Options of ``paceline simulate``."""

    model: str | None = argument(
        None,
        "Model that was traced: folder, GGUF file, name or hub id (default: the one that the "
        "traces name).",
    )
    traces: str | None = argument(None, "Folder written by paceline trace.")
    model_option: str | None = option(None, "The same as MODEL.", "--model")
    cost: str | None = option(
        None,
        "Costs of the model's steps: file of a profile, or name of an imported curve (default: "
        "its profile on this machine).",
    )
    draft_cost: str | None = option(
        None,
        "Costs of a draft model's steps: the same, or milliseconds per step (default: its "
        "profile on this machine).",
    )
    max_num_seqs: int = option(1, "Number of requests at a time.", "--concurrency")
    json: bool = option(False, JSON_HELP)


def simulate_command(options: SimulateOptions) -> int:
    """The work of ``paceline simulate``."""
    from paceline_lab.simulate.setup import cost_notes, num_learnt
    from paceline_lab.simulate.simulator import fixed_configs

    screen = Screen(json=options.json)
    model, folder = _inputs(options)
    configs = speculative_config(options, model)
    check_concurrency(options)
    fixed = fixed_configs(configs)
    wanted = [config for each in fixed.values() for config in each]
    opened = open_traces(options, model, folder, wanted, screen)
    simulator = opened.simulator
    notes = [*opened.answers, *opened.learnt, *opened.assumed, *cost_notes(simulator)]
    for note in notes:
        screen.note(f"note: {printable(note)}")
    began = time.perf_counter()
    with screen.progress("replaying", len(fixed) + 2) as advance:
        rows = _rows(simulator, configs, fixed, options.planner, advance)
    learnt = {name: num_learnt(fixed.get(name, configs), simulator.learnt) for name in rows}
    _show(simulator, rows, learnt, screen)
    screen.note(f"replayed in {time.perf_counter() - began:.1f} s")
    if options.json:
        screen.document(_document(simulator, configs, rows, learnt, notes))
    return 0


def _inputs(options: SimulateOptions) -> tuple[str, str]:
    """The model that answered, and the folder of its traces."""
    from paceline_lab.simulate.setup import meta_in
    from paceline_lab.trace.requests import traced_model

    model, folder = model_and_file(options.model, options.traces, options.model_option)
    if folder is None:
        raise ConfigError(
            "simulate needs a folder of traces: paceline trace MODEL --prompts FILE -o TRACES "
            "makes one, paceline simulate TRACES reads it"
        )
    meta = meta_in(folder)
    return model or traced_model(meta), folder


def open_traces(
    options: Any,
    model: str,
    folder: str,
    wanted: Sequence[SpeculativeConfig],
    screen: Screen,
    measured: Sequence[Profile] = (),
) -> Opened:
    """A simulator with the costs that the options name, as ``open_simulator`` says it.

    Args:
        options: an :class:`~paceline.cli.options.EngineOptions` with ``cost`` and ``draft_cost``.
    """
    from paceline_lab.simulate.setup import costs_of, open_simulator

    table, draft_table = costs_of(options.cost, options.draft_cost)
    with screen.progress("drafting", 100) as advance:
        return open_simulator(
            folder,
            model,
            EngineConfig(**engine_options(options)),
            wanted,
            table=table,
            draft_table=draft_table,
            measured=measured,
            advance=lambda share: advance(int(share * 100)),
        )


def check_concurrency(options: EngineOptions) -> None:
    """Check the engine's options where ``--concurrency`` says how many requests run at a time."""
    most = EngineConfig(**engine_options(options) | {"max_num_seqs": 1}).max_num_batched_tokens
    if options.max_num_seqs is not None:
        check_number("--concurrency", options.max_num_seqs, 1, min(most, MOST_REQUESTS))


def _rows(
    simulator: Simulator,
    configs: Configs,
    fixed: Mapping[str, Configs],
    planner: str,
    advance: Callable[[int], None],
) -> Rows:
    from paceline.planner.planner import PLANNERS
    from paceline_lab.simulate.simulator import best_of_each, largest_configs

    rows: Rows = {}
    for name, each in fixed.items():
        rows[name] = simulator.run(each, PLANNERS["fixed"])
        advance(len(rows))
    if configs:
        best = best_of_each(list(rows.values()))
        if planner != "fixed":
            make_planner, name = PLANNERS[planner], f"planner {planner}"
            rows[name] = simulator.run(configs, make_planner)
            if simulator.unions:
                rows[name + UNPRICED] = simulator.run(configs, make_planner, is_priced=False)
            advance(len(rows))
        rows[BEST_FIXED] = best
        rows[BEST_STEPS] = simulator.best_steps(largest_configs(fixed))
    return rows


def figures(result: ReplayResult) -> Figures:
    """The counters of a replay, whose seconds are predicted ones."""
    counts = {name: result.total(name) for name in COUNTERS}
    return Figures(result.ms / 1e3, result.total("num_emitted_tokens"), **counts)


def _show(simulator: Simulator, rows: Rows, learnt: Mapping[str, int], screen: Screen) -> None:
    from paceline_lab.simulate.setup import FOOTNOTE, MARK

    screen.say(said_of(simulator, rows[PLAIN]))
    cells = [_cells(simulator, name, rows, MARK if learnt[name] else "") for name in rows]
    screen.say(table(cells))
    if any(learnt.values()):
        screen.say(FOOTNOTE)


def said_of(simulator: Simulator, plain: ReplayResult) -> str:
    """What a table of predictions is made from."""
    return (
        f"predicted, not measured; answers: {len(simulator.traces)}, tokens: "
        f"{plain.total('num_emitted_tokens')}, requests at a time: "
        f"{simulator.config.max_num_seqs}, costs: {printable(simulator.table.name)}\n"
    )


def _cells(simulator: Simulator, name: str, rows: Rows, mark: str) -> dict[str, str]:
    result, counts = rows[name], figures(rows[name])
    steps = len(result.rows)
    read = list(filter(None, result.experts))  # by decoding steps of a mixture
    mean = f"{sum(read) / len(read):.0f}" if read else "-"
    return {
        "": name + mark,
        "steps": str(steps) if steps else "-",
        "rows/step": f"{sum(result.rows) / steps:.2f}" if steps else "-",
        **({"experts/step": mean} if simulator.unions else {}),
        "draft tokens": str(counts.num_draft_tokens),
        "accepted length": f"{counts.mean_acceptance_length:.2f}",
        "tok/s": "-" if simulator.table.is_relative else f"{counts.tokens_per_second:.1f}",
        "speed-up": f"{rows[PLAIN].ms / result.ms:.3f}",
    }


def _document(
    simulator: Simulator,
    configs: Configs,
    rows: Rows,
    learnt: Mapping[str, int],
    notes: Sequence[str],
) -> dict[str, Any]:
    return {
        **facts(simulator),
        "speculative_config": [asdict(config) for config in configs],
        "notes": list(notes),
        "rows": {
            name: _row(simulator, result, rows[PLAIN]) | {"num_learnt_prompts": learnt[name]}
            for name, result in rows.items()
        },
    }


def facts(simulator: Simulator) -> dict[str, Any]:
    """What a document says of the traces and their costs."""
    return {
        "model": simulator.meta.get("model"),
        "cost_table": simulator.table.name,
        "draft_cost_tables": {name: t.name for name, t in simulator.draft_tables.items()},
        "time_unit": "plain steps" if simulator.table.is_relative else "ms",
        "concurrency": simulator.config.max_num_seqs,
        "num_traces": len(simulator.traces),
    }


def counted(simulator: Simulator, result: ReplayResult) -> dict[str, Any]:
    """What a document says of a replay; there are no seconds where costs are multiples."""
    document = figures(result).document()
    no_time = {"seconds": None, "tokens_per_second": None}
    return document | no_time if simulator.table.is_relative else document


def _row(simulator: Simulator, result: ReplayResult, plain: ReplayResult) -> dict[str, Any]:
    return {
        **counted(simulator, result),
        "time": result.ms,
        "draft_time": result.draft_ms,
        "num_experts_read": sum(result.experts),
        "speedup": plain.ms / result.ms,
    }
