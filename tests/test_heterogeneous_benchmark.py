"""The benchmark of drafts of another vocabulary: its reference, and that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import FOLDER, ROOT, module


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (0, 0)),
        ([True] * 5, (1, 4)),  # four accepted, and the fifth is the bonus token
        ([True] * 6, (2, 5)),
        ([False, True, False, False], (3, 1)),
    ],
)
def test_steps_over_what_a_draft_foresees(flags: list[bool], expected: tuple[int, int]) -> None:
    assert module("heterogeneous_reference").steps_over(flags, 4) == expected


@pytest.mark.slow
def test_it_runs_and_its_results_can_be_shown(shared_data: Path, tmp_path: Path) -> None:
    file = tmp_path / "device" / "heterogeneous.json"
    command = [sys.executable, str(FOLDER / "heterogeneous.py"), "--quick", "--num-prompts", "1"]
    run = subprocess.run(
        [*command, "--max-tokens", "12", "--output", str(file)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "PACELINE_TEST_DATA": str(shared_data)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout.splitlines()[-1])
    identical = [t for t in document["targets"] if "identical" in t["name"]]
    assert [target["met"] for target in identical] == [True]
    assert "same vocabulary" in module("render").block("heterogeneous", tmp_path)
