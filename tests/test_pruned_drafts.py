"""The benchmark of cut drafts: what it cuts, its rows, and that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.llm import embedded_model
from paceline.training.configs import DraftTrainingConfig
from paceline.training.model_files import load_model
from paceline.training.surgery import cut_model
from tests.programs import FOLDER, ROOT, module


def test_every_variant_can_be_cut_and_is_smaller() -> None:
    whole = load_model(embedded_model("draft"))
    for name, cuts in module("pruned_drafts").variants().items():
        config = DraftTrainingConfig(target="t", init="d", output="o", steps=1, **cuts)
        cut = cut_model(whole, **config.cuts)
        assert (cut.num_params < whole.num_params) == any(config.cuts.values()), name
        assert 0 <= config.draft_vocab_size <= whole.config.vocab_size // 2


def test_a_failed_sample_has_no_length_and_fails_the_target() -> None:
    program = module("pruned_drafts")
    cell = {"step_ratio": [0.5, 0.4, 0.6]}
    good = {**cell, "prompts": 2, "identical": 2, "mean_acceptance_length": 1.5}
    row = {"draft": "small", "file_bytes": 1000, "read_bytes": 500, "at 0.0": good}
    (target,) = program.targets_of([{**row, "at 0.8": good}])
    assert target.met
    rows = [{**row, "at 0.8": {**cell, "error": "broken"}}]
    (target,) = program.targets_of(rows)
    assert not target.met
    last = program.tables(rows)[0].splitlines()[-1].split()
    assert last[-2:] == ["1.50", "-"]


@pytest.mark.slow
def test_it_runs_and_its_results_can_be_shown(tmp_path: Path) -> None:
    file = tmp_path / "device" / "pruned_drafts.json"
    command = [sys.executable, str(FOLDER / "pruned_drafts.py"), "--quick", "--prompts", "embedded"]
    run = subprocess.run(
        [*command, "--steps", "1", "--output", str(file), "--traces", str(tmp_path / "traces")],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout.splitlines()[-1])
    assert all(target["met"] for target in document["targets"])
    assert all(row["at 0.0"]["mean_acceptance_length"] > 1 for row in document["results"])
    assert "head of 1024 tokens" in module("render").block("pruned_drafts", tmp_path)
