"""The worked example of docs/proposers.md, installed and run as a user would."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config.speculative import ENTRY_POINTS
from tests.cli.conftest import Result
from tests.proposers.plugins import installer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "proposers.md"
PROMPT = "class A:\n    def __init__(self, x):\n        self.x = x\n\nclass B:\n    def __"


def block(language: str, word: str) -> str:
    """The page's only block of a language with a word in it."""
    blocks = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGE.read_text())
    (found,) = [str(each) for each in blocks if word in each]
    return found


def test_the_example_of_the_page(
    cli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = block("python", "class Phrasebook")
    assert len(source.splitlines()) <= 30
    entries = tomllib.loads(block("toml", ENTRY_POINTS))["project"]["entry-points"][ENTRY_POINTS]
    entries = {
        name: value.replace("phrasebook:", "some_plugin:") for name, value in entries.items()
    }
    run = ("run", "-p", PROMPT, "--max-tokens", "8", "--temperature", "0", "--json")
    options = {"phrases": [" def __init__(self, x):\n        self.x = x"]}
    config = json.dumps({"method": "phrasebook", "options": options, "num_speculative_tokens": 8})
    wanted = ("--speculative-config", config, "--planner", "fixed", "--strict")
    refused = cli(*run, *wanted)
    assert refused.code == 2
    assert "method is 'phrasebook'; allowed: prompt_lookup, suffix" in refused.err
    installer(tmp_path, monkeypatch)(source, entries)
    found = cli(*run, *wanted)
    assert found.code == 0, found.err
    assert "| phrasebook |" in found.err
    plain = cli(*run, "--no-speculation").document["outputs"][0]
    drafted = found.document["outputs"][0]
    assert drafted["token_ids"] == plain["token_ids"]
    assert found.document["speculative"]["num_accepted_tokens"] > 0
    assert cli(*run, "--method", "phrasebook", "--strict").err.count("KeyError('phrases')") == 1
