"""What a person types at a terminal, and what is kept of it."""

from __future__ import annotations

import json
import readline
from pathlib import Path

import pytest

from paceline.api.llm import embedded_model
from paceline.cli import chat
from paceline.cli.chat import PromptHistory
from paceline.core.folders import state_folder
from tests.cli.pseudo_terminal import at_a_terminal

READ = """
from paceline.cli.chat import typed
from paceline.cli.terminal import Terminal
terminal = Terminal(["earlier", "two\\nlines"])
while True:
    text = typed(terminal.read)
    terminal.remember(str(text))
    print(repr(text), flush=True)
"""
UP = "\x1b[A"


def paste(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="only GNU readline asks for it")
def test_a_paste_is_one_message() -> None:
    with at_a_terminal(["-c", READ], {}) as terminal:
        assert "\x1b[?2004h" in terminal.until("> ")  # it asks to be told of pastes
        terminal.type(paste("first\nsecond\n"))
        terminal.type("\n")
        terminal.until(repr("first\nsecond"))
        terminal.until("> ")
        terminal.type(paste("one\r") + " more\n")
        terminal.until(repr("one\n more"))


def test_arrows_bring_texts_back() -> None:
    with at_a_terminal(["-c", READ], {}) as terminal:
        terminal.until("> ")
        terminal.type(f"{UP}\n")
        terminal.until(repr("two\nlines"))
        terminal.until("> ")
        terminal.type('"""a\nb"""\n')
        terminal.until(repr("a\nb"))
        terminal.until("> ")
        terminal.type(f"{UP}{UP}{UP}{UP}\n")
        terminal.until(repr("earlier"))


def test_a_history_is_private_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "state" / "paceline" / "typed.jsonl"
    one, other = PromptHistory(path), PromptHistory(path)
    assert one.texts() == []
    one.add("first")
    other.add("zwei\nZeilen: ü")
    assert PromptHistory(path).texts() == ["first", "zwei\nZeilen: ü"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    one.add("third")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_history_does_not_grow_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MAX_ENTRIES", 3)
    path = tmp_path / "typed.jsonl"
    lines = [json.dumps(str(number)) for number in range(7)]
    path.write_text("\n".join([*lines, "damaged", "{}", ""]), encoding="utf-8")
    assert PromptHistory(path).texts() == ["6"]
    assert path.read_text(encoding="utf-8").splitlines() == ['"6"', "damaged", "{}"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_history_that_cannot_be_kept_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    history = PromptHistory(tmp_path / "file" / "typed.jsonl")
    assert history.texts() == []
    history.add("a")
    history.add("b")
    assert len(caplog.records) == 1
    assert "what is typed is not kept" in caplog.text


@pytest.mark.slow
def test_a_chat(tmp_path: Path) -> None:
    """The command itself, in two sessions."""
    environment = {"XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = ["-m", "paceline", "run", embedded_model("target"), "-n", "8"]
    with at_a_terminal(command, environment) as terminal:
        assert ", seed " in terminal.until("> ")
        terminal.type(paste("Once upon\na time"))
        terminal.type("\n")
        assert "cut at the limit of 8 tokens" in terminal.until(" tok/s")
        terminal.until("> ")
        terminal.type("/stats\n")
        terminal.until("all answers: 8 tokens")
        terminal.until("> ")
        terminal.type("/bye\n")
        terminal.to_the_end()
    (kept,) = tmp_path.glob("**/typed.jsonl")
    assert PromptHistory(kept).texts() == ["Once upon\na time", "/stats", "/bye"]
    with at_a_terminal(command, environment) as terminal:
        terminal.until("> ")
        terminal.type(UP * 3)
        terminal.until("a time")
        terminal.type("\n")
        terminal.until(" tok/s")
        terminal.until("> ")
        terminal.type("\x04")
        terminal.to_the_end()


def test_the_usual_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    PromptHistory().add("x")
    assert [path.name for path in state_folder().iterdir()] == ["typed.jsonl"]
