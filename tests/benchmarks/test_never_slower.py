"""The comparison of planners: its workloads, its cells, its statistics, and one short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.loading.catalogue import embedded_model
from paceline.request.request import FinishReason, StepOutput
from tests.programs import FOLDER, ROOT, module


def encode(text: str) -> list[int]:
    return list(text.encode())


# Workloads


def load(name: str, size: int = 2, count: int = 2, source: str = "embedded") -> Any:
    prompts = module("prompt_sets").load_prompts(source)
    return module("prompt_sets").load_workload(name, prompts, encode, 300, size, count)


@pytest.mark.parametrize("name", ["code", "random", "edit", "prose", "hostile", "json", "mixture"])
def test_workloads_without_public_data(name: str) -> None:
    workload = load(name, size=4, count=3)
    assert [len(group) for group in workload.groups] == [4, 4, 4]
    assert all(0 <= token < 300 for group in workload.groups for ids in group for token in ids)
    assert all(ids for group in workload.groups for ids in group)
    assert list(workload.prose) == ([0, 2] if name == "mixture" else [])


def test_a_mixture_is_half_prose() -> None:
    mixed = load("mixture", size=4, count=1).groups[0]
    assert mixed[::2] == load("prose", size=2, count=1).groups[0]
    assert mixed[1::2] == load("edit", size=2, count=1).groups[0]


def test_json_breaks_off_where_a_record_begins() -> None:
    (prompt,) = load("json", size=1, count=1).groups[0]
    whole = json.loads(bytes(prompt).decode().rstrip().removesuffix("{").rstrip(", \n") + "]")
    assert len(whole) == module("prompt_sets").RECORDS
    assert all(record.keys() == {"id", "text", "words"} for record in whole)


def test_random_prompts_have_their_length_and_come_again() -> None:
    first, again = load("random"), load("random")
    assert {len(ids) for group in first.groups for ids in group} == {550}
    assert first == again
    assert first.groups[0] != first.groups[1]


def test_sonnets_have_their_length(shared_data: Path) -> None:
    groups = load("sonnet", source="public").groups
    assert {len(ids) for group in groups for ids in group} == {550}
    assert groups[0] != groups[1]


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [("gsm8k", 2, "no gsm8k"), ("sonnet", 2, "sonnet.txt"), ("mixture", 1, "half")],
)
def test_what_is_missing_is_said(
    name: str, size: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TEST_DATA", str(tmp_path / "absent"))
    with pytest.raises(module("prompt_sets").MissingWorkloadError, match=reason):
        load(name, size=size)


# Cells


def test_the_registered_cells_cover_what_they_must() -> None:
    cells = module("never_slower")
    chosen = cells.PRE_REGISTERED
    names, requests, temperatures = map(set, zip(*chosen, strict=True))
    assert names == module("prompt_sets").DESCRIPTIONS.keys()
    assert {1, 4, 8, 16} <= requests
    assert {0.0, 0.8, 1.3} == temperatures
    assert all((name == "hostile") == (heat == 1.3) for name, _, heat in chosen)
    assert set(cells.QUICK) < set(chosen) < set(cells.full_grid())
    assert set(cells.INFLATED) < set(cells.full_grid())


def test_arms_meet_every_group_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    program, calls = module("never_slower"), []
    monkeypatch.setattr(
        program, "serve", lambda engine, prompts, params: calls.append((engine, prompts[0][0]))
    )
    monkeypatch.setattr(program, "count", lambda served, prose: {})
    arms = SimpleNamespace(engines={"a": "a", "b": "b"})
    workload = module("prompt_sets").Workload("code", [[[0]], [[1]], [[9]]])
    samples = program.run_cell(arms, workload, ("code", 1, 0.0), 4, 2, float("inf"))
    assert calls[:2] == [("a", 9), ("b", 9)]  # warming up, on prompts that are not measured
    text = "".join(f"{arm}{group}" for arm, group in calls[2:])
    assert text == "a0b0b1a1" + "b0a0a1b1"
    assert [(s.arm, s.item, s.repeat) for s in samples][3:5] == [("a", 1, 0), ("b", 0, 1)]


def test_repeats_that_do_not_fit_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    program = module("never_slower")
    monkeypatch.setattr(program, "serve", lambda *_: None)
    monkeypatch.setattr(program, "count", lambda *_, **__: {})
    arms = SimpleNamespace(engines={"a": None})
    workload = module("prompt_sets").Workload("code", [[[0]], [[9]]])
    assert len(program.run_cell(arms, workload, ("code", 1, 0.0), 4, 3, until=0.0)) == 2


# Statistics


def test_ours_against_the_best_of_the_cell_and_of_each_group() -> None:
    report = module("never_slower")
    times = {
        report.PLAIN: {0: {0: 4.0, 1: 4.0}, 1: {0: 4.0, 1: 4.0}},
        "left": {0: {0: 2.0, 1: 2.0}, 1: {0: 5.0, 1: 5.0}},
        "right": {0: {0: 6.0, 1: 6.0}, 1: {0: 3.0, 1: 3.0}},
        report.CONTROL: {0: {0: 1.0, 1: 1.0}, 1: {0: 1.0, 1: 1.0}},  # chosen by nobody
        report.OURS: {0: {0: 2.0, 1: 2.0}, 1: {0: 4.0, 1: 4.0}},
    }
    found = report.against_others(times)
    assert found["best_other"] == "left"
    assert found["ours_to_best"] == found["ours_to_best_held_out"] == pytest.approx(7 / 6)
    assert found["ours_to_oracle"] == found["ours_to_oracle_held_out"] == pytest.approx(5 / 6)


def test_luck_does_not_win_when_it_is_held_out() -> None:
    report = module("never_slower")
    lucky = {"a": (0.5, 1.1, 1.2), "b": (1.2, 0.5, 1.1), "c": (1.1, 1.2, 0.5)}
    times = {arm: {0: dict(enumerate(seconds))} for arm, seconds in lucky.items()}
    times[report.OURS] = {0: dict.fromkeys(range(3), 1.0)}
    assert report.against_others(times)["ours_to_best_held_out"] == pytest.approx(1.2)
    one = {arm: {0: {0: groups[0][0]}} for arm, groups in times.items()}
    assert report.against_others(one)["ours_to_best_held_out"] is None


def sample(arm: str, seconds: float | None, repeat: int = 0, **facts: Any) -> Any:
    known = {
        "output_tokens": 10,
        "num_steps": 10,
        "num_forwards": 10,
        "token_ids": [[1, 2]],
        "phases": {"propose": 0.0, "plan": 0.0, "forward": 0.8},
        "verification": 0.0,
        "seconds_per_prose_token": None,
    }
    error = "broken" if seconds is None else None
    return module("harness").Sample(arm, 0, repeat, seconds, known | facts, error)


def test_overhead_is_what_plain_steps_do_not_take() -> None:
    report = module("never_slower")
    phases = {"propose": 0.02, "plan": 0.01, "forward": 0.8}
    # Half the steps of the plain arm, whose steps take 0.02 outside the forward.
    ours = sample(report.OURS, 1.0, phases=phases, verification=0.05, num_forwards=5)
    found = report.overhead([sample(report.PLAIN, 1.0), ours])
    wanted = {"propose": 0.02, "plan": 0.01, "rest": 0.17 - 0.1, "verification": 0.05}
    assert found == pytest.approx({**wanted, "total": 0.15})


def row(label: dict[str, Any], ours: float | None, **facts: Any) -> dict[str, Any]:
    report = module("never_slower")
    samples = [sample(report.PLAIN, 1.0), sample(report.CONTROL, 1.0), sample("other", 0.8)]
    found: dict[str, Any] = report.cell_row([*samples, sample(report.OURS, ours, **facts)], label)
    return found


LABEL = {"workload": "code", "requests": 1, "temperature": 0.0}


def test_targets_of_known_cells() -> None:
    report = module("never_slower")
    rows = [row(LABEL, 0.5), row({**LABEL, "workload": "hostile"}, 1.25, verification=0.125)]
    slower, mean, worst, oracle, prose, spent = report.targets(rows)
    assert (slower.value, slower.met) == (1, False)
    assert mean.value == oracle.value == pytest.approx((1.6 * 0.64) ** 0.5)
    assert (worst.value, worst.met) == (pytest.approx(0.64), False)
    assert prose.value is None
    assert spent.value == pytest.approx((1.25 - 0.8 - 0.2 + 0.125) / 1.25)


def test_a_failed_cell_leaves_the_targets_without_values() -> None:
    report = module("never_slower")
    rows = [row(LABEL, 0.5), row(LABEL, None)]
    assert rows[1]["error"] == "broken"
    assert [target.value for target in report.targets(rows)] == [None] * 6
    assert "broken" in module("never_slower").tables(rows)[0]


def test_other_tokens_are_told() -> None:
    tables = module("never_slower").tables
    assert tables([row(LABEL, 0.5)])[0].endswith("yes")
    assert tables([row(LABEL, 0.5, token_ids=[[1, 3]])])[0].endswith("NO")


def test_pace_of_prose_while_its_neighbours_are_there() -> None:
    def out(request: int, count: int, ends: bool = False) -> StepOutput:
        reason = FinishReason.LENGTH if ends else None
        return StepOutput(request, [7] * count, ["x"] * count, finish_reason=reason)

    steps = [
        (1.0, [out(0, 1)]),
        (2.0, [out(0, 1), out(1, 1)]),  # now both have begun
        (3.0, [out(0, 2), out(1, 4)]),
        (5.0, [out(0, 1), out(1, 4, ends=True)]),
        (6.0, [out(0, 9, ends=True)]),
    ]
    arms = module("never_slower_arms")
    assert arms.pace_beside(arms.Served(None, [0, 1], steps), [0]) == pytest.approx(3.0 / 3)
    assert arms.pace_beside(arms.Served(None, [0, 1], steps), []) is None


# The whole program


@pytest.mark.slow
def test_it_runs_and_its_results_can_be_shown(tmp_path: Path) -> None:
    file = tmp_path / "device" / "never_slower.json"
    command = [sys.executable, str(FOLDER / "never_slower.py"), "--quick", "--prompts", "embedded"]
    options = ["--workloads", "code,hostile,mixture", "--max-tokens", "6", "--repeat", "1"]
    run = subprocess.run(
        [*command, *options, "--groups", "1", "--output", str(file)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout.splitlines()[-1])
    assert document["num_failed"] == 0
    rivals = module("rivals").ARMS
    for found in document["results"]:
        assert rivals.keys() < found["arms"].keys()
        assert all(arm["identical"] for arm in found["arms"].values())
    # So short an edit may end before every prompt is read, and nothing is beside the prose then.
    values = [t["value"] for t in document["targets"] if not t["name"].startswith("rate of prose")]
    assert len(values) == 5
    assert None not in values
    assert str(ROOT) not in run.stdout
    assert "arm / plain" in module("render").block("never_slower", tmp_path)


def test_a_larger_target_has_a_draft_model_where_the_embedded_one_has_n_grams() -> None:
    default = module("never_slower_arms").default
    suffix, ngram = default(embedded_model("draft"))
    assert (suffix.method, ngram.method) == ("suffix", "ngram_model")
    own, draft = default("larger")
    assert (own, draft.method, draft.model) == (suffix, "draft_model", "larger")
