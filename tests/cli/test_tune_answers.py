"""``paceline tune`` and the answers that it gets: too few, in another dtype, of another model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.api.llm import embedded_model
from paceline.loading.checkpoint import load_checkpoint, model_fingerprint
from paceline_lab.tune import search as tune_search
from paceline_lab.tune import setup as tune_setup
from tests.cli.conftest import Result
from tests.lab.toy_traces import frozen_cost

Cli = Callable[..., Result]
TARGET, DRAFT = embedded_model("target"), embedded_model("draft")
EDIT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return a +"
IN_FLOAT32 = ("--dtype", "float32", "--max-tokens", "4")


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tune_search, "SUFFIX_NODES", (1, 4))
    monkeypatch.setattr(tune_search, "DRAFT_NODES", (1, 2))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in (EDIT, "The old king")))
    return str(path)


def test_a_single_short_answer_is_too_few(cli: Cli, cost: tuple[str, ...], tmp_path: Path) -> None:
    one, file = tmp_path / "one.jsonl", tmp_path / "best.json"
    one.write_text(json.dumps({"prompt": EDIT}))
    arguments = ("tune", "--prompts", str(one), "--max-tokens", "8", "-o", str(file), *cost)
    found = cli(*arguments, "--json")
    assert found.code == 0, found.err
    assert found.document["best"] is not None
    assert found.document["rows"][0]["interval"] is None
    assert "answers: 1, tokens: 8, requests at a time: " in found.err
    assert "times plain decoding (no interval)" in found.err
    assert "too few answers (1 of 8 tokens) to be sure of any speed-up" in found.out
    assert f"written to {file}" in found.err
    assert "what was written may not pay: too few answers (1 of 8 tokens)" in found.err
    assert found.document["notes"][-1].startswith("too few answers (1 of 8 tokens)")


def test_remarks_on_answers_are_no_missing_costs(
    cli: Cli, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls = tmp_path / "answers", []
    assert cli("trace", TARGET, "--prompts", prompts, "-o", str(folder), *IN_FLOAT32).code == 0
    monkeypatch.setattr(tune_setup, "_profile", lambda *_: calls.append(1) or [])
    arguments = ("--traces", str(folder), "--dtype", "bfloat16", "--budget", "0.01", "--json")
    found = cli("tune", *arguments)
    assert found.code == 0, found.err
    assert "the answers were given in float32" in found.err
    assert calls == [1]  # there is no profile
    monkeypatch.setattr("paceline_lab.simulate.setup.stored_table", lambda *_: frozen_cost().table)
    assert "the answers were given in float32" in cli("tune", *arguments).err
    assert calls == [1]


def test_answers_of_another_model_are_refused(
    cli: Cli, cost: tuple[str, ...], prompts: str, tmp_path: Path
) -> None:
    folder = tmp_path / "answers"
    made = ("trace", TARGET, "--prompts", prompts, "-o", str(folder), "--max-tokens", "4")
    assert cli(*made).code == 0
    meta = folder / "meta.json"
    said = json.loads(meta.read_text()) | {
        "model_fingerprint": model_fingerprint(load_checkpoint(TARGET))
    }
    meta.write_text(json.dumps(said))
    for command in (
        ("tune", DRAFT, "--traces", str(folder)),
        ("simulate", str(folder), "--model", DRAFT),
    ):
        found = cli(*command, *cost)
        assert found.code == 2
        assert "the traces are answers of target" in found.err
        assert "draft, is another" in found.err
    assert cli("simulate", str(folder), "--no-speculation", *cost).code == 0
    assert cli("simulate", DRAFT, str(folder), *cost).code == 2  # MODEL first, as everywhere
    # Older traces do not say, and have a name at most.
    meta.write_text(json.dumps({k: v for k, v in said.items() if k != "model_fingerprint"}))
    found = cli("simulate", str(folder), "--model", DRAFT, "--no-speculation", *cost)
    assert found.code == 0, found.err
    assert "the traces are answers of target, and the model that is named is draft" in found.err
