"""Variables that nothing reads are named once; those that something reads are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.backends.native.native import missing
from paceline.cli.main import OTHER_VARIABLES, warn_of_unknown_variables
from paceline.cli.options import refuse_empty_variables
from paceline.cli.reference import all_commands
from paceline.cli.registry import option_variables
from paceline.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_unknown_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ("PACELINE_MAX_TOKENS", "PACELINE_HIDDEN_SIZE", "PACELINE_TEST_X", *OTHER_VARIABLES)
    for name in ("PACELINE_MAX_TOKEN", "PACELINE_QQ", "PACELIN_MAX_TOKENS", *known):
        monkeypatch.setenv(name, "1")
    warn_of_unknown_variables()
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
    assert named <= {*OTHER_VARIABLES, *option_variables()}


@pytest.mark.parametrize(
    ("command", "variable", "value"),
    [
        (("serve",), "PACELINE_API_KEY", ""),
        (("serve",), "PACELINE_API_KEY", " \n"),
        (("bench", "serve"), "PACELINE_API_KEY", " "),
        (("run",), "PACELINE_CONFIG", ""),
        (("run",), "PACELINE_STRICT", ""),
        (("doctor",), "PACELINE_MODEL", ""),
    ],
)
def test_an_empty_variable_is_refused(
    cli, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    result = cli(*command)
    assert result.code == 2
    said = f"the variable {variable} is set and empty; give it a value, or unset it"
    assert said in result.err


def test_the_variables_are_those_of_the_commands_parameters() -> None:
    read = {each.envvar for _, command in all_commands() for each in command.params if each.envvar}
    assert option_variables() == read


def test_every_option_refuses_its_variable_when_it_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for names, command in all_commands():
        context = command.make_context(" ".join(names), [], resilient_parsing=True)
        for variable in (each.envvar for each in command.params if each.envvar):
            with monkeypatch.context() as patch:
                patch.setenv(variable, "")
                with pytest.raises(ConfigError, match=f"{variable} is set and empty"):
                    refuse_empty_variables(context)


def test_the_command_line_comes_before_an_empty_variable(
    cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CONFIG", "")
    result = cli("run", "--config", "absent.json")
    assert "cannot read absent.json" in result.err


@pytest.mark.skipif(missing() is not None, reason="the native kernels are not built")
def test_an_empty_level_of_kernels_is_refused(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CPU_ISA", "")
    result = cli("run", "-p", "Hello", "--max-tokens", "1")
    assert result.code == 2
    assert "PACELINE_CPU_ISA is ''; this CPU and this build have" in result.err
