"""Drafts beside a model: which are found, and what is left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.resolve import default_speculative_config
from paceline.commands.speculators import bundled_drafts
from paceline.config import SpeculativeConfig


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
