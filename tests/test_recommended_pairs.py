"""Recommended settings: the search at a curve's costs, whose weights draft, rows, and one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.workbench.simulate import Simulator
from paceline.workbench.tune_search import Candidate
from tests.programs import FOLDER, ROOT, module
from tests.workbench.test_oracle import repetitive
from tests.workbench.toy_traces import frozen_cost, make_meta

SUFFIX = SpeculativeConfig("suffix", num_speculative_tokens=4)
MODEL = SpeculativeConfig("draft_model", "embedded draft", 3)


def test_without_a_drafts_costs_the_free_proposer_is_searched_alone() -> None:
    program, report = module("recommended_pairs"), module("recommended_pairs_report")
    config = EngineConfig(max_num_seqs=1)
    base = Simulator(repetitive(3, 5), make_meta(64), frozen_cost().table, {}, None, config)  # type: ignore[arg-type]
    curve = module("machine_curves").Curve("a machine", frozen_cost().table, None)
    made = module("report").Report("recommended_pairs", {"curves": {}})
    settings, rows = program.predict(base, curve, 1.0, made)
    assert list(settings) == ["suffix"]
    assert made.results == rows
    (row,) = rows
    assert (row["pair"], row["who"], row["pays"]) == ("a machine", "suffix", True)
    assert row["setting"] == settings["suffix"].name
    assert row["predicted"]["low"] <= row["predicted"]["value"] <= row["predicted"]["high"]
    assert row["predicted_length"] > 1.0
    assert report.targets(rows) == []
    assert len(made.samples[0]["ms"]) == 5
    assert "a machine" in made.config["curves"]


def test_settings_are_measured_with_the_weights_of_the_pair() -> None:
    both = Candidate(("suffix", "draft model"), 4, (SUFFIX, MODEL), "auto")
    arms = module("recommended_pairs").arms_of({"suffix + draft model": both}, "a folder")
    assert list(arms) == ["plain", "suffix + draft model", "plain again"]
    suffix, draft = arms["suffix + draft model"].configs
    assert (suffix.model, draft.model) == (None, "a folder")
    assert draft.num_speculative_tokens == 3
    assert arms["suffix + draft model"].planner == "auto"
    assert arms["plain"].configs == arms["plain again"].configs == ()


def sample(arm: str, item: int, seconds: float | None, tokens: tuple[int, ...] = (1, 2)) -> Any:
    facts = {"token_ids": [list(tokens)], "output_tokens": 2, "num_steps": 1}
    failed = None if seconds is not None else "broken"
    return module("harness").Sample(arm, item, 0, seconds, {} if failed else facts, failed)


def predicted(pair: str, value: float | None = 2.0) -> dict[str, Any]:
    interval = {"value": value, "low": 1.5, "high": 2.5}
    head = {"pair": pair, "who": "suffix", "setting": "suffix 4", "planner": "auto"}
    return {**head, "predicted": interval, "pays": True, "predicted_length": 2.25}


def test_rows_of_what_was_measured() -> None:
    report = module("recommended_pairs_report")
    samples = [sample("plain", item, 2.0) for item in (0, 1)]
    samples += [sample("suffix", 0, 1.0), sample("suffix", 1, 1.0)]
    row = {**predicted("here"), **report.measured_cells(samples, "suffix")}
    assert (row["measured"]["value"], row["measured_length"], row["identical"]) == (2.0, 2.0, True)
    control = {**report.control_cells("here"), **report.measured_cells(samples, "plain")}
    assert report.cells(control)[1:7] == ["measured", "plain again", "-", "-", "-", "-"]
    rows = [predicted("elsewhere"), row, control]
    assert [target.value for target in report.targets(rows)] == [0.0, 1.0]
    assert report.cells(rows[0])[1] == "predicted"
    assert report.cells(rows[0])[-2:] == ["-", "-"], "predicted only"
    assert report.cells(row)[1] == "measured"
    assert report.cells(row)[-2:] == ["2.00 (2.00 to 2.00)", "2.00"]
    samples[-1] = sample("suffix", 1, 1.0, (1, 3))
    assert not report.measured_cells(samples, "suffix")["identical"]
    # A failed run has no number, and leaves the targets without one.
    samples[-1] = sample("suffix", 1, None)
    failed = {**predicted("here"), **report.measured_cells(samples, "suffix")}
    assert "measured" not in failed
    assert report.cells(failed)[1] == "failed"
    assert report.cells(failed)[-2:] == ["broken", "-"]
    # Too few answers have no interval.
    few = predicted("few") | {"predicted": {"value": 1.5, "low": None, "high": None}}
    assert report.cells(few)[5] == "1.50"
    assert [target.value for target in report.targets([failed, control])] == [None, None]
    assert report.raw("here", samples[-1])["error"] == "broken"


def test_a_page_shows_what_is_saved(tmp_path: Path) -> None:
    render, page = module("render"), "<!-- begin: recommended_pairs -->\n<!-- end -->\n"
    assert render.rendered(page, tmp_path) == page, "nothing was saved"
    made = module("report").Report("recommended_pairs", {"prompts": "public"})
    made.results = [predicted("one"), predicted("two") | {"measured": predicted("")["predicted"]}]
    file = tmp_path / "device" / "recommended_pairs.json"
    file.parent.mkdir()
    file.write_text(json.dumps(made.document("cpu")))
    lines = render.rendered(page, tmp_path).splitlines()
    shown = "2.00 (1.50 to 2.50)"
    assert f"| one | predicted | suffix | suffix 4 | auto | {shown} | yes | 2.25 | - | - |" in lines
    assert (
        f"| two | measured | suffix | suffix 4 | auto | {shown} | yes | 2.25 | {shown} | - |"
        in lines
    )


def test_unknown_pairs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module("recommended_pairs").options_of(["--ours", "7b"])
    assert "embedded, 0.5b" in capsys.readouterr().err
    assert module("recommended_pairs").options_of(["--ours="]).ours == []


@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "recommended_pairs.py"), "--quick", "--json"]
    smaller = (
        "--ours embedded --budget 0.5 --max-tokens 8 --profile-seconds 0.01 --prompts embedded"
    )
    run = subprocess.run(
        [*command, *smaller.split(), "--traces", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    here = [row for row in document["results"] if row["pair"].startswith("this machine")]
    assert [row["who"] for row in here][-1] == "plain again"
    assert {row["who"] for row in here} >= {"suffix", "draft model"}
    assert all(row["identical"] for row in here)
    assert all(target["value"] is not None for target in document["targets"])
    assert str(ROOT) not in run.stdout
