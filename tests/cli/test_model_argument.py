"""MODEL comes first; commands without it; the embedded model by its name."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import LLM
from paceline.build.default_drafts import default_speculative_config, is_embedded
from paceline.cli import run
from paceline.cli.model_argument import lasting_name, model_and_file
from paceline.cli.options import RunOptions
from paceline.core.errors import ConfigError
from paceline.loading.catalogue import embedded_model
from paceline.loading.checkpoint import load_checkpoint
from tests.cli.conftest import Result
from tests.loading.catalogues import isolate, name_models

Cli = Callable[..., Result]
LINES = (
    ("run",),
    ("run", "-p", "hi"),
    ("serve",),
    ("verify",),
    ("profile",),
    ("explain", "-p", "x"),
    ("tune",),
    ("trace", "--prompts", "x", "-o", "y"),
    ("bench", "throughput"),
    ("run-batch", "requests.jsonl"),
    ("train", "ngram", "--stdlib", "-o", "x"),
    ("train", "draft", "--stdlib", "-o", "x"),
    ("convert",),
    ("pull",),
    ("rm",),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setattr("tests.cli.conftest.ASKING", ())
    return tmp_path


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that ``paceline run`` would open."""
    found: list[str] = []

    def answer(options: RunOptions) -> int:
        found.append(options.model)
        return 0

    monkeypatch.setattr(run, "run_command", answer)
    return found


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_without_a_model_there_is_a_list_and_a_proposal(cli: Cli, line: tuple[str, ...]) -> None:
    result = cli(*line)
    assert (result.code, result.out) == (2, "")
    assert "smollm2" in result.err
    assert "  gemma3-270m  Gemma 3 270M" in result.err
    assert "  embedded" in result.err
    if line[0] != "train":
        words = [word for word in line if word in ("bench", "throughput")] or [line[0]]
        assert f"Try: paceline {' '.join(words)} smollm2" in result.err


def test_a_terminal_is_asked(cli: Cli, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "StringIO", Terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for answer, model in (("\n", "smollm2"), ("gemma3-270m\n", "gemma3-270m")):
        result = cli("run", "-p", "x", stdin=answer)
        assert result.code == 0
        assert "  gemma3-270m  Gemma 3 270M" in result.err
        assert opened.pop() == model


def test_the_embedded_model_has_a_name_and_an_option(cli: Cli, opened: list[str]) -> None:
    assert cli("run", "embedded", "-p", "x").code == 0
    assert cli("run", "--embedded", "-p", "x").code == 0
    assert cli("run", "embedded", "--embedded", "-p", "x").code == 0
    assert opened == ["embedded"] * 3
    result = cli("run", "x", "--embedded")
    assert result.code == 2
    assert "paceline run embedded" in result.err


def test_commands_that_need_no_model_go_without(cli: Cli, folder: Path) -> None:
    assert "missing.jsonl cannot be read" in cli("profile", "--import", "missing.jsonl").err
    assert "folder of traces" in cli("tune", "--traces", str(folder / "none")).err


def test_the_name_is_the_model_with_its_drafts() -> None:
    assert is_embedded("embedded")
    assert is_embedded(embedded_model("target"))
    assert not is_embedded(embedded_model("draft"))
    by_folder = default_speculative_config(embedded_model("target"))
    assert default_speculative_config("embedded") == by_folder
    assert [config.method for config in by_folder] == ["suffix", "ngram_model"]
    assert load_checkpoint("embedded").name == "embedded"


def test_a_folder_and_a_name_of_the_user_come_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_models(f'[embedded]\npath = "{embedded_model("draft")}"')
    assert not is_embedded("embedded")
    (folder / "embedded").mkdir()
    monkeypatch.chdir(folder)
    assert not is_embedded("embedded")


def test_python_names_both() -> None:
    with pytest.raises(ConfigError, match=r'LLM\("smollm2"\).*LLM\("embedded"\)'):
        LLM(None)


def test_it_stays(cli: Cli) -> None:
    result = cli("rm", "embedded", "--yes")
    assert result.code == 2
    assert "embedded is part of Paceline" in result.err


@pytest.mark.parametrize(
    ("first", "second", "option", "found"),
    [
        ("model", "file", None, ("model", "file")),
        ("file", None, None, (None, "file")),
        ("file", None, "model", ("model", "file")),
        ("model", "file", "other", ("model", "file")),
        (None, "file", "model", ("model", "file")),
        (None, None, "model", ("model", None)),
    ],
)
def test_arguments(
    first: str | None,
    second: str | None,
    option: str | None,
    found: tuple[str | None, str | None],
) -> None:
    assert model_and_file(first, second, option) == found


def test_names_last_and_paths_are_made_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert lasting_name("here") == str(tmp_path / "here")
    assert lasting_name("smollm2") == "smollm2"
    assert lasting_name("org/name") == "org/name"
    assert lasting_name("embedded") == lasting_name(embedded_model("target")) == "embedded"
