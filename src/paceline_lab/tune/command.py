"""``paceline tune``: the best way to speculate for a model, its drafts, prompts and machine.

Owns the order of the work and what is written at its end; the search is
:mod:`paceline_lab.tune.tuning`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from paceline.api.llm import LLM
from paceline.cli.config_file import write_config_file
from paceline.cli.settings import engine_options
from paceline.cli.terminal import Screen, printable
from paceline.config.speculative import ForwardingConfig, HeadConfig
from paceline.planner.planner import PLANNERS
from paceline_lab.simulate.command import counted, facts, said_of
from paceline_lab.simulate.simulator import Simulator
from paceline_lab.tune.draft_quality import DraftQuality, draft_quality
from paceline_lab.tune.plots import plot_tuning
from paceline_lab.tune.setup import (
    TuneOptions,
    check_files,
    drafts_to_try,
    simulator_for,
    traced,
    usual_proposers,
    with_traced_model,
)
from paceline_lab.tune.tuning import Drafts, SpeedUp, Tuning, TuningRow, tune
from paceline_lab.tune.view import (
    configuration,
    doubt,
    how_to_use,
    nodes_per_step,
    quality_table,
    ranking,
    verdict,
)

QUALITY_TOKENS = 2048
"""On which draft models are compared with their target."""


def tune_command(options: TuneOptions) -> int:
    """The work of ``paceline tune``."""
    check_files(options)
    options = with_traced_model(options)
    screen, seconds = Screen(json=options.json), dict[str, float]()
    drafts = drafts_to_try(options)
    with TemporaryDirectory(prefix="paceline-") as spare:
        with _timed(seconds, "answers"):
            folder = traced(options, spare)
        with _timed(seconds, "costs and drafts"):
            simulator, notes = simulator_for(options, folder, drafts, screen)
    for note in notes:
        screen.note(f"note: {printable(note)}")
    screen.note(f"searching for about {options.budget:g} s")
    planners = [name for name in PLANNERS if options.planner in ("auto", name)]
    default = usual_proposers(options.model)
    tuning = tune(simulator, drafts, planners, options.budget, default=default)
    seconds["search"] = tuning.seconds
    with _timed(seconds, "comparing drafts"):
        qualities = _qualities(options, simulator, drafts)
    _show(simulator, tuning, qualities, drafts, screen)
    screen.note(", ".join(f"{name}: {each:.1f} s" for name, each in seconds.items()))
    best_options, few = configuration(options, tuning), doubt(tuning)
    if options.output is not None:
        write_config_file(options.output, best_options)
        screen.note(f"written to {options.output}")
        if few is not None and tuning.best is not None:
            screen.note("note: what was written may not pay: " + few)
    if options.plot is not None:
        title = f"Ways to speculate with {facts(simulator)['model']}"
        plot_tuning(tuning, options.plot, title, next(iter(verdict(tuning, drafts))))
    use = how_to_use(best_options, options.output)
    screen.say(f"to use it: {printable(use)}")
    if options.json:
        more = {"notes": [*notes, *filter(None, [few])], "seconds": seconds, "config": best_options}
        screen.document(_document(simulator, tuning, qualities) | more | {"use": use})
    return 0


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


def _qualities(
    options: TuneOptions, simulator: Simulator, drafts: Drafts
) -> dict[str, DraftQuality | None]:
    """By name; None of what has no distribution over the target's tokens by itself."""
    qualities: dict[str, DraftQuality | None] = dict.fromkeys(drafts)
    comparable = {
        name: draft
        for name, draft in drafts.items()
        if isinstance(draft, ForwardingConfig)
        and not draft.may_translate
        and not isinstance(draft, HeadConfig)
    }
    if not comparable:
        return qualities
    with LLM(options.model, speculative_config=[], **engine_options(options)) as llm:
        for name, draft in comparable.items():
            measure = partial(
                draft_quality,
                config=draft,
                traces=simulator.traces,
                meta=simulator.meta,
                max_tokens=QUALITY_TOKENS,
                checkpoint=simulator.target.checkpoint,
            )
            qualities[name] = llm.call(measure)
    return qualities


def _show(
    simulator: Simulator,
    tuning: Tuning,
    qualities: Mapping[str, DraftQuality | None],
    drafts: Drafts,
    screen: Screen,
) -> None:
    screen.say(said_of(simulator, tuning.plain.result))
    screen.say(ranking(tuning, simulator.table.is_relative) + "\n")
    if qualities:
        screen.say(quality_table(qualities, tuning) + "\n")
    for line in verdict(tuning, drafts):
        screen.say(line)


def _document(
    simulator: Simulator, tuning: Tuning, qualities: Mapping[str, DraftQuality | None]
) -> dict[str, Any]:
    """What was found, as plain values."""
    row, gain = partial(_row, simulator), tuning.gain(tuning.best)
    return {
        **facts(simulator),
        "num_candidates": tuning.num_candidates,
        "num_left_out": tuning.num_left_out,
        "best": tuning.best and tuning.best.name,
        "best_over_default": gain and _speedup(gain),
        "plain": row(tuning.plain),
        "default": tuning.default and row(tuning.default),
        "rows": [
            row(first) | {"same": [each.name for each in larger]}
            for first, *larger in tuning.distinct()
        ],
        "oracles": [row(each) for each in tuning.oracles],
        "drafts": {name: quality and asdict(quality) for name, quality in qualities.items()},
    }


def _row(simulator: Simulator, row: TuningRow) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": row.name,
        **_speedup(row.speedup),
        "nodes_per_step": nodes_per_step(row),
        "num_learnt_prompts": row.num_learnt,
        **counted(simulator, row.result),
    }
    if row.candidate is not None:
        configs = [asdict(config) for config in row.candidate.configs]
        document |= {"planner": row.candidate.planner, "speculative_config": configs}
    return document


def _speedup(speedup: SpeedUp) -> dict[str, Any]:
    return {
        "speedup": speedup.value,
        "interval": None if speedup.low is None else [speedup.low, speedup.high],
    }
