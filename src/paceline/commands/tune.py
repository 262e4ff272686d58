"""``paceline tune``: the best way to speculate for a model, its drafts, prompts and machine.

Owns the order of the work and what is written at its end; the search is
:mod:`paceline.workbench.tune`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from paceline.commands.config_file import write_config_file
from paceline.commands.display import Screen, printable
from paceline.commands.options import EngineOptions
from paceline.commands.resolve import engine_options
from paceline.commands.simulate import counted, facts, said_of
from paceline.commands.tune_setup import (
    TuneOptions,
    check_files,
    drafts_to_try,
    simulator_for,
    traced,
)
from paceline.commands.tune_view import (
    doubt,
    nodes_per_step,
    quality_table,
    ranking,
    verdict,
)
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.engine.planners import PLANNERS
from paceline.llm import LLM
from paceline.workbench.draft_quality import DraftQuality, draft_quality
from paceline.workbench.plots import plot_tuning
from paceline.workbench.simulate import Simulator
from paceline.workbench.simulate_setup import num_learnt
from paceline.workbench.tune import Drafts, Row, Tuning, tune

QUALITY_TOKENS = 2048
"""On which draft models are compared with their target."""
WHO = ("model", "draft_layers", "dtype", "use_heterogeneous_vocab")
"""What says who drafts, beside the method."""
NOT_WRITTEN = ("config", "max_num_seqs", "planner")
"""Options of the engine that are no part of what was tuned, or are written by themselves."""


def tune_command(options: TuneOptions) -> int:
    """The work of ``paceline tune``."""
    check_files(options)
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
    tuning = tune(simulator, drafts, planners, options.budget)
    seconds["search"] = tuning.seconds
    with _timed(seconds, "comparing drafts"):
        qualities = _qualities(options, simulator, drafts)
    _show(simulator, tuning, qualities, drafts, screen)
    screen.note(", ".join(f"{name}: {each:.1f} s" for name, each in seconds.items()))
    found, few = configuration(options, tuning.best), doubt(tuning)
    if options.output is not None:
        write_config_file(options.output, found)
        screen.note(f"written to {options.output}: paceline run --config {options.output}")
        if few is not None and tuning.best is not None:
            screen.note("note: what was written may not pay: " + few)
    if options.plot is not None:
        plot_tuning(tuning, options.plot)
    if options.json:
        more = {"notes": [*notes, *filter(None, [few])], "seconds": seconds, "config": found}
        screen.document(_document(simulator, tuning, qualities) | more)
    return 0


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


def _qualities(
    options: TuneOptions, simulator: Simulator, drafts: Drafts
) -> dict[str, DraftQuality | None]:
    """By name; None of what has no distribution over the target's tokens."""
    found: dict[str, DraftQuality | None] = dict.fromkeys(drafts)
    comparable = {
        name: draft
        for name, draft in drafts.items()
        if draft.needs_forwards and not draft.use_heterogeneous_vocab
    }
    if not comparable:
        return found
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
            found[name] = llm.call(measure)
    return found


def _show(
    simulator: Simulator,
    tuning: Tuning,
    qualities: Mapping[str, DraftQuality | None],
    drafts: Drafts,
    screen: Screen,
) -> None:
    screen.say(said_of(simulator, tuning.plain.result))
    screen.say(ranking(tuning, simulator.table.is_relative, simulator.learnt) + "\n")
    if qualities:
        screen.say(quality_table(qualities, tuning) + "\n")
    for line in verdict(tuning, drafts):
        screen.say(line)


def configuration(options: TuneOptions, best: Row | None) -> dict[str, Any]:
    """Options of ``paceline run`` for what was found; without speculation where nothing pays."""
    found: dict[str, Any] = {
        field.name: getattr(options, field.name)
        for field in fields(EngineOptions)
        if field.name not in NOT_WRITTEN and getattr(options, field.name) != field.default
    }
    if options.model is not None:
        found["model"] = options.model
    if best is None:
        return found | {"no_speculation": True}
    assert best.candidate is not None
    proposers = [_said(config) for config in best.candidate.configs]
    return found | {"speculative_config": proposers, "planner": best.candidate.planner}


def _said(config: SpeculativeConfig) -> dict[str, Any]:
    """A configuration without what it would have anyway, and without what only the search wants."""
    default, values = asdict(SpeculativeConfig()), asdict(config)
    said = {name: values[name] for name in WHO if values[name] != default[name]}
    said["method"] = config.method
    (usual,) = parse_speculative_config(said)
    kept = (*said, "num_speculative_tokens")
    return {
        name: value
        for name, value in values.items()
        if name != "suffix_decoding_max_cached_requests"
        and (name in kept or value != getattr(usual, name))
    }


def _document(
    simulator: Simulator, tuning: Tuning, qualities: Mapping[str, DraftQuality | None]
) -> dict[str, Any]:
    """What was found, as plain values."""
    row = partial(_row, simulator)
    return {
        **facts(simulator),
        "num_candidates": tuning.num_candidates,
        "num_left_out": tuning.num_left_out,
        "best": tuning.best and tuning.best.name,
        "plain": row(tuning.plain),
        "rows": [
            row(first) | {"same": [each.name for each in larger]}
            for first, *larger in tuning.distinct()
        ],
        "oracles": [row(each) for each in tuning.oracles],
        "drafts": {name: found and asdict(found) for name, found in qualities.items()},
    }


def _row(simulator: Simulator, row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": row.name,
        "speedup": row.speedup.value,
        "interval": None if row.speedup.low is None else [row.speedup.low, row.speedup.high],
        "nodes_per_step": nodes_per_step(row),
        "num_learnt_prompts": num_learnt(row.configs, simulator.learnt),
        **counted(simulator, row.result),
    }
    if row.candidate is not None:
        configs = [asdict(config) for config in row.candidate.configs]
        found |= {"planner": row.candidate.planner, "speculative_config": configs}
    return found
