"""The replays of ``acceptance.py``: every proposer on answers that plain decoding gave.

One request at a time, so that counts depend on nothing but the texts. Draft models are run once
along each answer. What ``suffix`` knows of earlier answers it learns within a set: no prompt comes
twice, and every arm begins with nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from acceptance_sets import Cell
from harness import Sample, note, run_sample
from node_budget import NodeBudget, Reliability
from proposer_sets import NODES, SIZED, SIZES, for_acceptance, trees_of
from trace_sets import MAX_MODEL_LEN

from paceline.config import EngineConfig, SpeculativeConfig, parse_speculative_config
from paceline.llm import embedded_model
from paceline.metrics import SpeculationCounters
from paceline.policy.cost_prior import prior_table
from paceline.training.ngram.options import NgramTrainingConfig
from paceline.training.ngram.train import train_ngram
from paceline.workbench.replay import ReplayResult
from paceline.workbench.simulate import Simulator
from paceline.workbench.simulate_setup import open_simulator

ORDER, MAX_BYTES = 4, 32 << 20
ANY_COST = 1.0
"""Of a draft model's step: fixed numbers of nodes go by no cost."""


@dataclass(slots=True)
class Outcome:
    """A replay, and how reliable its estimates were."""

    counters: SpeculationCounters
    planner: NodeBudget


def train(cells: Sequence[Cell], file: Path) -> str:
    """The n-gram model of all answers that do not judge."""
    note("training the n-gram model")
    folders = tuple(str(cell.learnt) for cell in cells)
    train_ngram(
        NgramTrainingConfig(
            output=str(file), traces=folders, order=ORDER, max_bytes=MAX_BYTES, held_out_tokens=0
        )
    )
    return str(file)


def opened(cell: Cell, device: str) -> Simulator:
    config = EngineConfig(device=device, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    drafts = parse_speculative_config([trees_of(max(SIZES))["draft_model"]])
    target = embedded_model("target")
    costs = {"table": prior_table(), "draft_table": ANY_COST}
    return open_simulator(cell.judged, target, config, drafts, **costs).simulator


def run_arm(simulator: Simulator, configs: Sequence[SpeculativeConfig], nodes: int) -> Outcome:
    planner = NodeBudget(nodes)
    result = simulator.run(configs, lambda cost, drafting, objective: planner)
    return Outcome(_counters(result), planner)


def _counters(result: ReplayResult) -> SpeculationCounters:
    total = SpeculationCounters()
    for trace in result.traces:
        total.add(trace.counters)
    return total


def sizes_of(arms: Sequence[str]) -> list[tuple[str, int]]:
    """Every arm with the number of nodes at which all are compared, some with others too."""
    others = [(name, nodes) for name in SIZED if name in arms for nodes in SIZES if nodes != NODES]
    return [(name, NODES) for name in arms] + others


def replayed(cell: Cell, ngram: str, arms: Sequence[str], device: str) -> list[Sample]:
    """A sample per arm and number of nodes; its facts are the outcome."""
    simulator = opened(cell, device)

    def run(name: str, nodes: int) -> Outcome:
        configs = parse_speculative_config(for_acceptance(nodes, ngram)[name])
        return run_arm(simulator, configs, nodes)

    return [
        run_sample(name, nodes, partial(run, name, nodes), lambda outcome: {"outcome": outcome})
        for name, nodes in sizes_of(arms)
    ]


def row_of(sample: Sample, label: Mapping[str, Any]) -> dict[str, Any]:
    row = {**label, "proposer": sample.arm, "nodes": sample.item}
    if sample.failed:
        return {**row, "error": sample.error}
    outcome: Outcome = sample.facts["outcome"]
    return {
        **row,
        **ratios(outcome.counters),
        "reliability": outcome.planner.chosen_by.ratios(),
    }


def ratios(total: SpeculationCounters) -> dict[str, Any]:
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "accepted_per_node": total.acceptance_rate,
        "nodes_per_step": total.num_draft_tokens / total.num_steps if total.num_steps else 0.0,
        "by_proposer": {
            name: [own.num_draft_tokens, own.num_accepted_tokens]
            for name, own in total.by_proposer.items()
        },
    }


def raw(sample: Sample, label: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a sample: its counters; no time, because none is claimed."""
    kept = {"arm": sample.arm, "nodes": sample.item, **label, "error": sample.error}
    return kept if sample.failed else kept | {"counters": asdict(sample.facts["outcome"].counters)}


def over_all(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Per arm the calibration of what was chosen by, and of each proposer's part, over all sets."""
    rows, samples = [], [sample for sample in samples if sample.item == NODES]
    for arm in dict.fromkeys(sample.arm for sample in samples):
        parts: dict[str, Reliability] = {}
        chosen_by = Reliability()
        for sample in samples:
            if sample.arm == arm and not sample.failed:
                planner = sample.facts["outcome"].planner
                chosen_by.join(planner.chosen_by)
                for name, own in planner.own.items():
                    parts.setdefault(name, Reliability()).join(own)
        row = {"proposer": arm, "set": "all", "reliability": chosen_by.ratios()}
        rows.append(row | {"parts": {name: own.ratios() for name, own in parts.items()}})
    return rows
