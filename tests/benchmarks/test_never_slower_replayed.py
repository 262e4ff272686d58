"""The grid by replay: that it runs on its own tables, and what it makes of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.planner.cost_table import CostPoint, CostTable
from paceline.profiling.profile import Profile
from paceline.request.traces import read_meta, read_traces
from tests.programs import module

WIDTHS = [(requests, width) for requests in (1, 4) for width in (1, 8, 64)]


def row(**changes: Any) -> dict[str, Any]:
    found = {"pair": "embedded", "workload": "code", "requests": 4, "temperature": 0.0}
    found |= {"plain_tokens_per_second": 100.0, "acceptance_length": 1.5, "best_other": "p_min"}
    found |= {"arms": {"plain": 1.0, "p_min": 1.25, "ours": 1.5}}
    return {**found, "ours_to_best": 1.2, "ours_to_oracle": 1.1, **changes}


def test_targets_are_of_each_pair() -> None:
    slow = row(pair="inflated", arms={"ours": 0.98}, ours_to_best=0.9, prose_beside=0.94)
    targets = module("never_slower_replayed").targets([row(), slow])
    values = {target.name: target.value for target in targets}
    assert values["embedded: cells whose ours/plain is below 0.99"] == 0
    assert values["inflated: cells whose ours/plain is below 0.99"] == 1
    assert values["inflated: ours / the best other arm, worst cell"] == 0.9
    assert values["embedded: rate of prose beside edits, worst cell"] is None
    assert values["inflated: rate of prose beside edits, worst cell"] == 0.94


def test_every_arm_is_compared_for_one_request_and_for_several() -> None:
    rows = [row(), row(requests=1, arms={"plain": 1.0, "p_min": 0.8, "ours": 1.2})]
    lines = module("never_slower_replayed").rules(rows).splitlines()
    assert lines[0].split("  ")[0] == "arm / plain"
    found = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert found["p_min"] == ["0.800", "0.800", "1.250", "1.250"]
    assert found["ours"] == ["1.200", "1.200", "1.500", "1.500"]


def test_a_summary_names_the_worst_workload() -> None:
    rows = [row(), row(workload="prose", arms={"plain": 1.0, "p_min": 1.0, "ours": 0.9})]
    summary, _ = module("never_slower_replayed").tables([*rows, row(temperature=0.8)])
    greedy, sampled = summary.splitlines()[-2:]
    assert "greedy" in greedy
    assert greedy.split()[-1] == "prose"
    assert sampled.split()[-1] == "code"


def table(name: str, ms: float) -> CostTable:
    points = [CostPoint(n, 0, width, width, ms * (1 + n * width / 16)) for n, width in WIDTHS]
    return CostTable(name, points)


def test_saved_tables_give_the_same_ratios_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = module("never_slower_replayed")
    profiles = [Profile(table("target", 4.0)), Profile(table("draft", 0.5))]
    monkeypatch.setattr(program, "measure_profiles", lambda *_: (profiles, []))
    file = tmp_path / "first.json"
    options = ["--quick", "--prompts", "embedded", "--workloads", "code,prose"]
    options += ["--concurrency", "1,16", "--num-prompts", "2"]
    options += ["--traces", str(tmp_path)]
    assert program.main([*options, "--output", str(file)]) == 0
    assert program.main([*options, "--costs", str(file), "--json"]) == 0
    first = json.loads(file.read_text())
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [r["workload"] for r in first["results"]] == ["code", "prose"]
    assert again["results"] == first["results"]


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
    first, second = module("ablation_grid").published(file)
    assert (first.name, second.name, second.draft) == ("one", "two", None)
    draft, plain = first.draft.milliseconds(1, 0), first.target.milliseconds(1, 0)
    assert draft / plain == pytest.approx(0.25)
