"""Variables that nothing reads are named once; those that something reads are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from paceline.cli import OTHER_VARIABLES, app, option_variables, warn_of_unknown_variables

ROOT = Path(__file__).resolve().parents[2]
COMMAND = typer.main.get_command(app)


def test_unknown_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ("PACELINE_MAX_TOKENS", "PACELINE_HIDDEN_SIZE", "PACELINE_TEST_X", *OTHER_VARIABLES)
    for name in ("PACELINE_MAX_TOKEN", "PACELINE_QQ", "PACELIN_MAX_TOKENS", *known):
        monkeypatch.setenv(name, "1")
    warn_of_unknown_variables(COMMAND)
    assert capsys.readouterr().err.splitlines() == [
        "warning: nothing reads the variable 'PACELINE_MAX_TOKEN'; "
        "did you mean PACELINE_MAX_TOKENS?",
        "warning: nothing reads the variable 'PACELINE_QQ'",
    ]


def test_commands_warn_once_and_go_on(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DTYP", "int8")
    result = cli("run", "--config", "absent.json")
    assert result.err.count("did you mean PACELINE_DTYPE?") == 1
    assert "cannot read absent.json" in result.err


def test_what_the_sources_read_is_known() -> None:
    """Every name that the package or its kernels spell out as a string."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    named = {
        name
        for path in files
        for name in re.findall(r'"(PACELINE_[A-Z_]*[A-Z])"', path.read_text(encoding="utf-8"))
    }
    assert "PACELINE_CPU_ISA" in named
    assert named <= {*OTHER_VARIABLES, *option_variables(COMMAND)}
