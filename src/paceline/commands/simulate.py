"""``paceline simulate``: what speculation would bring on traces, with every cost known.

Owns the order of the rows and how they are shown; replays are :mod:`paceline.workbench.simulate`'s.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.commands.display import Screen, printable, table
from paceline.commands.profile_view import describe
from paceline.commands.report import Figures
from paceline.commands.resolve import engine_options, speculative_config
from paceline.commands.simulate_options import SimulateOptions
from paceline.config import EngineConfig
from paceline.engine.planners import PLANNERS
from paceline.llm import embedded_model
from paceline.policy.cost_table import CostTable
from paceline.workbench.replay import ReplayResult
from paceline.workbench.simulate import (
    Configs,
    Simulator,
    best_of_each,
    fixed_configs,
    largest_configs,
)
from paceline.workbench.simulate_setup import draft_table_of, open_simulator, profile_named

PLAIN, BEST_FIXED, BEST_STEPS = "plain", "best fixed of each prompt", "best drafts of each step"
HEADERS = ("", "steps", "rows/step", "draft tokens", "accepted length", "tok/s", "speed-up")
Rows = dict[str, ReplayResult]


def simulate_command(options: SimulateOptions) -> int:
    """Run the command; returns its exit code.

    Raises:
        PacelineError: the traces, a model or a cost table cannot be used.
    """
    screen = Screen()
    costs, draft_costs = _costs(options, screen)
    configs = speculative_config(options, options.model)
    fixed = fixed_configs(configs)
    with screen.progress("drafting", 100) as advance:
        simulator, notes = open_simulator(
            options.traces,
            options.model or embedded_model("target"),
            EngineConfig(**engine_options(options)),
            [config for each in fixed.values() for config in each],
            table=costs,
            draft_table=draft_costs,
            advance=lambda share: advance(int(share * 100)),
        )
    for note in notes:
        screen.note(f"note: {printable(note)}")
    began = time.perf_counter()
    with screen.progress("replaying", len(fixed) + 2) as advance:
        rows = _rows(simulator, configs, fixed, options.planner, advance)
    seconds = time.perf_counter() - began
    _show(simulator, rows, screen)
    screen.note(f"replayed in {seconds:.1f} s")
    if options.json:
        screen.say(json.dumps(_document(simulator, configs, rows, notes)))
    return 0


def _costs(
    options: SimulateOptions, screen: Screen
) -> tuple[CostTable | None, CostTable | float | None]:
    """What the options say of the target's costs and of a draft model's; None is nothing."""
    table_ = None if options.cost is None else _named(options.cost, screen)
    if options.draft_cost is None:
        return table_, None if options.cost is None else draft_table_of(options.cost)
    try:
        return table_, float(options.draft_cost)
    except ValueError:
        return table_, _named(options.draft_cost, screen)


def _named(source: str, screen: Screen) -> CostTable:
    profile = profile_named(source)
    screen.note(f"costs of {describe(profile)}")
    return profile.table


def _rows(
    simulator: Simulator,
    configs: Configs,
    fixed: Mapping[str, Configs],
    planner: str,
    advance: Callable[[int], None],
) -> Rows:
    rows: Rows = {}
    for name, each in fixed.items():
        rows[name] = simulator.run(each, PLANNERS["fixed"])
        advance(len(rows))
    if configs:
        best = best_of_each(list(rows.values()))
        if planner != "fixed":
            rows[f"planner {planner}"] = simulator.run(configs, PLANNERS[planner])
            advance(len(rows))
        rows[BEST_FIXED] = best
        rows[BEST_STEPS] = simulator.best_steps(largest_configs(fixed))
    return rows


def figures(result: ReplayResult) -> Figures:
    """The counters of a replay, whose seconds are predicted ones."""
    return Figures(
        seconds=result.ms / 1e3,
        output_tokens=result.total("num_emitted_tokens"),
        num_steps=result.total("num_steps"),
        num_drafts=result.total("num_drafts"),
        num_draft_tokens=result.total("num_draft_tokens"),
        num_accepted_tokens=result.total("num_accepted_tokens"),
    )


def _show(simulator: Simulator, rows: Rows, screen: Screen) -> None:
    tokens = rows[PLAIN].total("num_emitted_tokens")
    count = simulator.config.max_num_seqs
    screen.say(
        f"predicted, not measured: {len(simulator.traces)} traces, {tokens} tokens, {count} "
        f"{'request' if count == 1 else 'requests'} at a time; costs: "
        f"{printable(simulator.table.name)}\n"
    )
    screen.say(table(HEADERS, [_cells(simulator, name, rows) for name in rows]))


def _cells(simulator: Simulator, name: str, rows: Rows) -> list[str]:
    result, counted = rows[name], figures(rows[name])
    steps = len(result.rows)
    return [
        name,
        str(steps) if steps else "-",
        f"{sum(result.rows) / steps:.2f}" if steps else "-",
        str(counted.num_draft_tokens),
        f"{counted.mean_acceptance_length:.2f}",
        "-" if simulator.table.is_relative else f"{counted.tokens_per_second:.1f}",
        f"{rows[PLAIN].ms / result.ms:.3f}",
    ]


def _document(
    simulator: Simulator, configs: Configs, rows: Rows, notes: Sequence[str]
) -> dict[str, Any]:
    unit = "plain steps" if simulator.table.is_relative else "ms"
    return {
        "model": simulator.meta.get("model"),
        "cost_table": simulator.table.name,
        "draft_cost_tables": {name: t.name for name, t in simulator.draft_tables.items()},
        "time_unit": unit,
        "concurrency": simulator.config.max_num_seqs,
        "speculative_config": [asdict(config) for config in configs],
        "num_traces": len(simulator.traces),
        "notes": list(notes),
        "rows": {name: _row(simulator, result, rows[PLAIN]) for name, result in rows.items()},
    }


def _row(simulator: Simulator, result: ReplayResult, plain: ReplayResult) -> dict[str, Any]:
    counted = figures(result).speculative()
    if simulator.table.is_relative:
        counted |= {"seconds": None, "tokens_per_second": None}
    return {
        **counted,
        "num_forwards": len(result.rows) or None,
        "steps_by_rows": dict(sorted(Counter(result.rows).items())),
        "time": result.ms,
        "draft_time": result.draft_ms,
        "speedup": plain.ms / result.ms,
        "traces": {
            "prompt_index": [trace.prompt_index for trace in simulator.traces],
            "time": [trace.ms for trace in result.traces],
            "num_steps": [trace.counters.num_steps for trace in result.traces],
            "output_tokens": [trace.counters.num_emitted_tokens for trace in result.traces],
        },
    }
