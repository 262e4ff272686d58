"""The benchmark of parallel drafts: its rows and its target, and that it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.llm import embedded_model
from tests.programs import FOLDER, ROOT, module


def samples(arm: str, seconds: float, tokens: list[int], error: str | None = None) -> list[Any]:
    facts = {"token_ids": tokens, "num_steps": 2, "num_drafts": 2, "by_depth": [2, 1, 0]}
    return [
        module("harness").Sample(arm, item, 0, None if error else seconds, facts, error)
        for item in (0, 1)
    ]


def test_rows_targets_and_tables() -> None:
    report = module("parallel_draft_report")
    done = samples("plain", 4.0, [1, 2, 3])
    done += samples("draft_model, 3", 2.0, [1, 2, 3]) + samples("parallel_draft, 3", 1.6, [1, 2, 3])
    rows = [report.row_of(done, method, 3) for method in ("draft_model", "parallel_draft")]
    assert [row["speedup"]["value"] for row in rows] == pytest.approx([2.0, 2.5])
    assert all(row["identical"] for row in rows)
    assert rows[0]["mean_acceptance_length"] == 1.5
    assert rows[0]["accepted_by_depth"] == [1.0, 0.5, 0.0]
    (ratio,) = report.ratios(done, [3])
    assert ratio["ratio"]["value"] == pytest.approx(1.25)
    label = {"temperature": 0.0}
    results = [{"kind": "arm", **label, **row} for row in rows]
    results.append({"kind": "ratio", **label, **ratio})
    results.append({"kind": "time", "method": "draft_model", "length": 3, "draft_ms": 0.5})
    faster, identical = report.targets(results)
    assert faster.value == pytest.approx(1.25)
    assert faster.met
    assert identical.value == 1.0
    first, second = report.tables(results)
    assert "1.25 (1.25 to 1.25)" in first
    assert second.splitlines()[-1].split()[-3:] == ["100%", "50%", "0%"]


def test_other_tokens_and_failures_are_no_speed_up() -> None:
    report = module("parallel_draft_report")
    done = samples("plain", 4.0, [1, 2, 3]) + samples("draft_model, 3", 2.0, [1, 2, 4])
    done += samples("parallel_draft, 3", 1.0, [], error="broken")
    rows = [report.row_of(done, method, 3) for method in ("draft_model", "parallel_draft")]
    assert not rows[0]["identical"]
    assert rows[1]["error"] == "broken"
    results = [{"kind": "arm", "temperature": 0.0, **row} for row in rows]
    assert [target.met for target in report.targets(results)] == [False, False]
    assert "-" in report.tables(results)[0].splitlines()[-1].split()


@pytest.mark.slow
def test_it_runs_and_its_results_can_be_shown(tmp_path: Path) -> None:
    draft, file = tmp_path / "draft", tmp_path / "device" / "parallel_draft.json"
    shutil.copytree(embedded_model("draft"), draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"pard_token": 3}))
    command = [
        sys.executable,
        str(FOLDER / "parallel_draft.py"),
        "--quick",
        "--prompts",
        "embedded",
    ]
    run = subprocess.run(
        [*command, "--parallel-draft", str(draft), "--output", str(file)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout.splitlines()[-1])
    assert document["targets"][1]["met"]
    times = [row for row in document["results"] if row["kind"] == "time"]
    assert all(row["draft_ms"] > 0 for row in times)
    assert "parallel over sequential" in module("render").block("parallel_draft", tmp_path)
