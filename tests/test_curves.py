"""Replays on other machines' curves: what is watched, traced once, summed up, and one short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.planners import PLANNERS
from paceline.policy.cost_points import StepShape
from paceline.traces import read_meta, read_traces
from paceline.workbench.simulate import Simulator
from tests.programs import FOLDER, ROOT, module
from tests.workbench.test_oracle import repetitive
from tests.workbench.toy_traces import frozen_cost, make_meta


@pytest.mark.parametrize("planner", ["auto", "fixed"])
def test_watching_changes_nothing_and_sees_every_step(planner: str) -> None:
    cost, config = frozen_cost(), EngineConfig(max_num_seqs=1)
    traces = repetitive(3, 3)
    simulator = Simulator(traces, make_meta(64), cost.table, {}, None, config)  # type: ignore[arg-type]
    configs = [SpeculativeConfig(num_speculative_tokens=4)]
    result, watched = module("watched").watch(simulator, configs, PLANNERS[planner])
    assert result.ms == simulator.run(configs, PLANNERS[planner]).ms
    # Every prompt is read in one step, which samples its last row.
    prompts = [trace.prompt_len for trace in traces]
    assert watched.prompt_ms == pytest.approx(
        sum(cost.predict(StepShape(n, 0, 0, 1)) for n in prompts)
    )
    assert sum(watched.nodes.values()) == len(result.rows) - len(traces)
    nodes = sum(count * steps for count, steps in watched.nodes.items())
    assert nodes == result.total("num_draft_tokens")
    facts = module("watched").facts(result)
    plain = module("watched").facts(simulator.plain())
    row = module("watched").ratios(facts, plain, watched.prompt_ms)
    assert row["speedup"] == pytest.approx(row["plain_time"] / row["time"])
    assert row["plain_time"] < sum(plain["ms"])


def test_answers_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = module("trace_sets")
    first = sets.traced("code", ["def add(a, b):", "x"], 5, 0.0, tmp_path)
    monkeypatch.setattr(sets, "LLM", None)
    assert sets.traced("code", ["def add(a, b):", "x"], 5, 0.0, tmp_path) == first
    with pytest.raises(TypeError):
        sets.traced("code", ["def add(a, b):", "y"], 5, 0.0, tmp_path)
    assert [len(trace.output_token_ids) for trace in read_traces(first)] == [5, 5]
    assert read_meta(first)["params"]["temperature"] == 0.0


def test_a_published_curve_comes_with_its_draft(tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    one = {"name": "one", "cost_ratio": [1.0, 1.5], "draft_step_ratio": 0.25}
    two = {"name": "two", "cost_ratio": [1.0], "draft_step_ratio": None}
    file.write_text(json.dumps({"curves": [one, two]}))
    machines = module("machine_curves")
    first, second = machines.published(file)
    assert (first.name, second.name, second.draft) == ("one", "two", None)
    described = machines.describe(first)
    assert described["draft_step_ratio"] == 0.25
    assert described["cost_ratio"][:2] == [1.0, 1.5]
    assert machines.describe(second)["draft_step_ratio"] is None


def cell(curve: str, ours: float, best: float, oracle: float, rule: float = 0.5) -> list[Any]:
    """Rows of a cell; the best fixed length is 3."""
    report = module("curves_report")
    speedups = {report.PLAIN: 1.0, report.OURS: ours, report.OURS_TREES: ours}
    speedups |= {report.fixed(k): best - 0.1 * abs(k - 3) for k in report.LENGTHS}
    speedups |= dict.fromkeys(report.RULES, rule)
    speedups |= {report.BEST_FIXED: oracle, report.BEST_STEPS: 2 * oracle}
    label = {"curve": curve, "text": "code", "proposer": "draft_model"}
    common = {"plain_time": 12.0, "acceptance_length": 2.0, "nodes_per_step": 1.0}
    return [
        {
            **label,
            **common,
            "arm": arm,
            "speedup": value,
            "time": 12.0 / value,
            "nodes": {"0": 3, "2": 1},  # as JSON has them
        }
        for arm, value in speedups.items()
    ]


def test_targets_are_judged_over_all_cells() -> None:
    report = module("curves_report")
    rows = cell("A", 1.5, 1.5, 1.5) + cell("B", 0.98, 0.9, 1.0, rule=1.0)
    values = [target.value for target in report.targets(rows)]
    assert values == pytest.approx([0.98, 0.98**0.5, 0.98, 0.98**0.5])
    rows[3] = {key: rows[3][key] for key in ("curve", "text", "proposer", "arm")} | {"error": "x"}
    assert [target.value for target in report.targets(rows)] == [None] * 4


def test_tables_show_every_curve() -> None:
    report = module("curves_report")
    legend, ranking, choices, machines = report.tables(
        cell("RTX", 2.0, 1.5, 1.6) + cell("M1", 1.0, 0.8, 1.0)
    )
    assert legend.splitlines() == ["A: RTX", "B: M1"]
    assert ranking.splitlines()[2].split()[:6] == ["A", "code", "draft_model", "1.50", "at", "3"]
    assert choices.splitlines()[2].split()[3:7] == ["1.00", "75%", "0%", "25%"]
    lines = {line.split("  ")[0]: line.split()[-3:] for line in machines.splitlines()}
    assert lines["fixed, K = 3"] == ["2.00", "1.50", "0.80"]
    assert lines["planner"] == ["2.00", "2.00", "1.00"]


@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    sizes = ("--num-prompts", "1", "--max-tokens", "8", "--profile-seconds", "0.05")
    command = [sys.executable, str(FOLDER / "curves.py"), "--quick", "--json", *sizes]
    run = subprocess.run(
        [*command, "--prompts", "embedded", "--traces", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["benchmark"] == "curves"
    assert {row["text"] for row in document["results"]} == {"code", "prose", "edit"}
    assert "this machine, embedded pair" in document["config"]["curves"]
    assert all(target["value"] is not None for target in document["targets"])
    assert str(ROOT) not in run.stdout
