"""Drafts beside a model: which are found, and what is left out."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.engine.bundled_drafts import bundled_drafts
from paceline.engine.default_drafts import default_speculative_config
from paceline.llm import LLM
from paceline.models.embedded import embedded_model, embedded_ngram_model


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return folder


def test_a_model_without_drafts_has_none(tmp_path: Path) -> None:
    assert bundled_drafts(str(write(tmp_path, {}))) == ()
    assert bundled_drafts("org/name") == ()


def test_drafts_lie_in_the_folder_or_in_folders_of_it(tmp_path: Path) -> None:
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    config = {"speculators_config": {"proposal_methods": methods}}
    one = write(tmp_path / "speculators" / "a", config)
    two = write(tmp_path / "speculators" / "b", {"speculators_model_type": "independent"})
    (tmp_path / "speculators" / "notes").mkdir()
    assert bundled_drafts(str(tmp_path)) == (
        SpeculativeConfig("draft_model", str(one), num_speculative_tokens=3),
        SpeculativeConfig("draft_model", str(two)),
    )
    top = write(tmp_path / "speculators", {"model_type": "llama"})
    assert bundled_drafts(str(tmp_path))[0].model == str(top)
    suffix, *drafts = default_speculative_config(str(tmp_path))
    assert suffix.method == "suffix"
    assert len(drafts) == 3


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
def test_parallel_drafts_are_run_as_such(tmp_path: Path, key: str) -> None:
    place = write(tmp_path / "speculators" / "a", {key: 7})
    (draft,) = bundled_drafts(str(tmp_path))
    assert draft == parse_speculative_config({"method": "parallel_draft", "model": str(place)})[0]
    write(place, {key: None})
    assert [draft.method for draft in bundled_drafts(str(tmp_path))] == ["draft_model"]


def test_a_bundled_parallel_draft_drafts(tmp_path: Path) -> None:
    place = tmp_path / "target" / "speculators" / "pard"
    shutil.copytree(embedded_model("target"), tmp_path / "target")
    shutil.copytree(embedded_model("draft"), place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "pard_token": 3}))
    model = str(tmp_path / "target")
    with LLM(model, speculative_config=bundled_drafts(model)) as llm:
        assert llm.proposers == ("parallel_draft",)


def test_files_of_ngrams(tmp_path: Path) -> None:
    place = tmp_path / "speculators"
    (place / "chat").mkdir(parents=True)
    for path in (place / "b.ngram", place / "a.ngram", place / "chat" / "model.ngram"):
        shutil.copy(embedded_ngram_model(), path)
    drafts = bundled_drafts(str(tmp_path))
    names = [place / "a.ngram", place / "b.ngram", place / "chat" / "model.ngram"]
    assert [draft.model for draft in drafts] == [str(name) for name in names]
    wanted = {"method": "ngram_model", "model": str(names[0])}
    assert drafts[:1] == parse_speculative_config(wanted)
    with LLM(speculative_config=drafts[:1]) as llm:
        assert llm.proposers == ("ngram_model",)


def test_ngrams_of_another_program_have_to_be_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "speculators" / "chat"
    place.mkdir(parents=True)
    (place / "model.bin").write_bytes(b"x")
    assert bundled_drafts(str(tmp_path)) == ()
    assert f"--import-uzu {place / 'model.bin'} -o {place / 'model.ngram'}" in caplog.text
    caplog.clear()
    shutil.copy(embedded_ngram_model(), place / "model.ngram")
    assert len(bundled_drafts(str(tmp_path))) == 1
    assert not caplog.text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ("{", "Expecting"),
        ("[]", "no object"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 99}]}}, "99"),
    ],
)
def test_what_does_not_run_is_left_out_and_said(
    tmp_path: Path, config: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "speculators", config)
    with caplog.at_level(logging.WARNING):
        assert bundled_drafts(str(tmp_path)) == ()
    assert reason in caplog.text
