"""The simulated rows of ``draft_length.py``: answers of the embedded pair at other costs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from draft_length_report import PLANNER, SIMULATED
from harness import run_sample
from machine_curves import Curve
from trace_sets import MAX_MODEL_LEN, traced
from watched import facts, ratios, watch

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.planners import PLANNERS
from paceline.llm import embedded_model
from paceline.workbench.replay import ReplayResult
from paceline.workbench.simulate import Simulator
from paceline.workbench.simulate_setup import open_simulator

LONGEST = 32


def chain(model: str, length: int) -> SpeculativeConfig:
    """Exactly so many tokens in every step, however unlikely they are."""
    return SpeculativeConfig("draft_model", model, length, min_accept_prob=0.0)


def opened(options: argparse.Namespace, name: str, texts: Sequence[str]) -> Simulator:
    """Answers and drafts of the embedded pair; costs are to be put in."""
    folder = traced(name, texts, options.max_tokens, options.temperature, options.traces)
    config = EngineConfig(device=options.device, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    wanted = [chain(embedded_model("draft"), LONGEST)]
    return open_simulator(folder, embedded_model("target"), config, wanted).simulator


def on(simulator: Simulator, curve: Curve) -> Simulator:
    assert curve.draft is not None
    return replace(
        simulator, table=curve.target, draft_tables={embedded_model("draft"): curve.draft}
    )


def simulate(
    simulator: Simulator, lengths: Sequence[int | str], label: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and samples, one for each length; a length may be the planner."""
    plain = facts(simulator.plain())
    _, known = watch(simulator, [chain(embedded_model("draft"), 1)], PLANNERS["fixed"])
    rows: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for length in lengths:
        sample = run_sample(str(length), str(label), partial(_run, simulator, length), _counted)
        head = {**label, "kind": SIMULATED, "K": length}
        samples.append({**head, "error": sample.error, **sample.facts})
        if sample.failed:
            rows.append({**head, "error": sample.error})
            continue
        row = {**head, **ratios(sample.facts, plain, known.prompt_ms)}
        # The first token of an answer comes with the reading of its prompt.
        tokens = sample.facts["tokens"] - len(simulator.traces)
        speed = {"tokens_per_second": tokens / row["time"] * 1e3, "nodes": sample.facts["nodes"]}
        rows.append(row | speed)
    return rows, samples


def _run(simulator: Simulator, length: int | str) -> tuple[ReplayResult, Mapping[int, int]]:
    """A replay, and how many steps had so many nodes."""
    if length == 0:
        return simulator.plain(), {}
    is_planner = length == PLANNER
    config = chain(embedded_model("draft"), LONGEST if is_planner else int(length))
    result, watched = watch(simulator, [config], PLANNERS["auto" if is_planner else "fixed"])
    return result, watched.nodes


def _counted(found: tuple[ReplayResult, Mapping[int, int]]) -> dict[str, Any]:
    result, nodes = found
    return {**facts(result), "nodes": dict(sorted(nodes.items()))}
