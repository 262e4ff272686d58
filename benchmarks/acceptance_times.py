"""The part of ``acceptance.py`` that a busy machine spoils: times of steps, and what they bring.

In the engine, one request at a time, every arm on the same answers in turn. A step's time is all of
it: drafting, the target's forward, and the host. So trees can be compared at equal numbers of nodes
and at equal milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from acceptance_engine import answer, budgeted, open_llm
from acceptance_sets import Cell
from harness import Sample, note, run_sample
from proposer_sets import NODES, SIZES, for_acceptance, trees_of
from report import Report, number, table

from paceline import LLM
from paceline.metrics import SpeculationCounters

MORE_NODES = 64
"""Of trees that cost no forwards, to fill the time of those that do."""
NGRAM, DRAFT, PARALLEL = "ngram_model", "draft_model", "parallel_draft"


@dataclass(frozen=True, slots=True)
class Arm:
    proposer: str
    nodes: int
    configs: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Times:
    """Of one arm at one temperature: microseconds and milliseconds of every step."""

    host_us: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    counters: SpeculationCounters = field(default_factory=SpeculationCounters)


def arms_of(options: argparse.Namespace, ngram: str) -> Iterator[Arm]:
    """All proposers with equal nodes, and three of them with several numbers of nodes."""
    for name, configs in for_acceptance(NODES, ngram).items():
        if name in options.proposers and name not in (NGRAM, DRAFT):
            yield Arm(name, NODES, configs)
    for nodes in (*SIZES, MORE_NODES):
        trees = trees_of(nodes, ngram)
        if options.parallel_draft:
            parallel = {"method": PARALLEL, "model": str(options.parallel_draft)}
            trees[PARALLEL] = {**trees[DRAFT], **parallel}
        for name in (NGRAM, DRAFT, PARALLEL):
            wanted = name in options.proposers or name == PARALLEL
            if name in trees and wanted and (nodes in SIZES or name == NGRAM):
                yield Arm(name, nodes, [trees[name]])


def run(options: argparse.Namespace, cells: Sequence[Cell], ngram: str, report: Report) -> None:
    count = max(1, options.num_prompts // 8)
    report.config["times_of_prompts"] = count
    arms = list(arms_of(options, ngram))
    found: dict[tuple[int, float], Times] = {}
    with open_llm(options.device, batch=1) as llm:
        for turn, cell in enumerate(cells):
            note(f"timing: {cell.name}, temperature {cell.temperature}")
            order = list(enumerate(arms))
            for at, arm in order if turn % 4 < 2 else reversed(order):
                sample = _timed(llm, cell, arm, count)
                report.samples.append(_raw(sample, cell, arm))
                if not sample.failed:
                    _add(found.setdefault((at, cell.temperature), Times()), sample)
    for (at, temperature), times in sorted(found.items()):
        report.results.append(_row(arms[at], temperature, times))


def _timed(llm: LLM, cell: Cell, arm: Arm, count: int) -> Sample:
    def timed() -> Any:
        planner = budgeted(llm, arm.configs, arm.nodes)
        return planner, answer(llm, cell, cell.answers(count))

    def counted(result: Any) -> dict[str, Any]:
        planner, outputs = result
        total = SpeculationCounters()
        for output in outputs:
            if output.error is not None:
                raise output.error
            total.add(output.completions[0].counters)
        return {"host_us": planner.host_us, "step_ms": planner.step_ms, "counters": total}

    return run_sample(arm.proposer, (cell.name, cell.temperature), timed, counted)


def _add(times: Times, sample: Sample) -> None:
    times.host_us += sample.facts["host_us"]
    times.step_ms += sample.facts["step_ms"]
    times.counters.add(sample.facts["counters"])


def _raw(sample: Sample, cell: Cell, arm: Arm) -> dict[str, Any]:
    kept = {"arm": arm.proposer, "nodes": arm.nodes, **cell.label, "error": sample.error}
    if not sample.failed:
        for name in ("host_us", "step_ms"):
            kept[name] = [round(value, 3) for value in sample.facts[name]]
    return kept


def _row(arm: Arm, temperature: float, times: Times) -> dict[str, Any]:
    return {
        "proposer": arm.proposer,
        "nodes": arm.nodes,
        "temperature": temperature,
        "mean_acceptance_length": times.counters.mean_acceptance_length,
        "host_us": statistics.median(times.host_us) if times.host_us else None,
        "step_ms": statistics.median(times.step_ms) if times.step_ms else None,
    }


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    headers = ["proposer", "nodes", "temperature", "length", "host us", "ms per step", "tokens/s"]
    return [
        table(headers, [_line(row) for row in results]),
        table(
            ["in the time of", "temperature", "ms", "its length", *_rivals(results)],
            [*_equal(results)],
        ),
    ]


def _line(row: Mapping[str, Any]) -> list[str]:
    ms = row["step_ms"]
    speed = row["mean_acceptance_length"] / ms * 1e3 if ms else None
    return [
        row["proposer"],
        str(row["nodes"]),
        number(row["temperature"], 1),
        number(row["mean_acceptance_length"]),
        number(row["host_us"], 0),
        number(ms),
        number(speed, 0),
    ]


def _rivals(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in (NGRAM, PARALLEL) if any(row["proposer"] == name for row in results)]


def _equal(results: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """For each tree of the draft model, the best of the others whose step takes no longer."""
    for row in results:
        if row["proposer"] != DRAFT or not row["step_ms"]:
            continue
        cells = []
        for name in _rivals(results):
            able = [
                (each["mean_acceptance_length"], each["nodes"])
                for each in results
                if each["proposer"] == name
                and each["temperature"] == row["temperature"]
                and each["step_ms"]
                and each["step_ms"] <= row["step_ms"]
            ]
            length, nodes = max(able, default=(None, 0))
            cells.append(f"{number(length)} ({nodes})" if able else "-")
        head = [f"{DRAFT} {row['nodes']}", number(row["temperature"], 1), number(row["step_ms"])]
        yield [*head, number(row["mean_acceptance_length"]), *cells]
