"""The frame of the command line: how fast help is, the table, variables, ``python -m paceline``."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.backends.native.native import missing
from paceline.cli.main import OTHER_VARIABLES, warn_of_unknown_variables
from paceline.cli.options import refuse_empty_variables
from paceline.cli.reference import all_commands
from paceline.cli.registry import (
    LABORATORY,
    ROOT,
    SECTIONS,
    Command,
    commands_of,
    load,
    option_variables,
)
from paceline.core.errors import ConfigError
from paceline.core.installation import install_command

SOURCE = str(Path(paceline.__file__).parent.parent)
ALL_COMMANDS = [command for group in LABORATORY for command in commands_of(group)]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "paceline", *arguments)


def processor_seconds(*arguments: str) -> float:
    """Of a run of Python; other processes do not lengthen it as they do the time that passes."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert python(*arguments).returncode == 0
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


@pytest.mark.timing
def test_help_takes_little_more_than_typer_itself() -> None:
    help_seconds, typer_seconds = [], []
    for _ in range(6):
        help_seconds.append(processor_seconds("-m", "paceline", "--help"))
        typer_seconds.append(processor_seconds("-c", "import typer"))
        if min(help_seconds) < 1.5 * min(typer_seconds):
            return  # the best of them counts
    pytest.fail(f"help: {min(help_seconds):.2f} s, typer: {min(typer_seconds):.2f} s")


def test_version() -> None:
    assert call("--version").stdout == f"paceline {paceline.__version__}\n"


IMPORTS = """
import sys
from paceline.cli.main import main
for line in {lines}:
    try:
        main(line)
    except SystemExit:
        print(*sys.modules, file=sys.stderr)
"""


def imported_by(*lines: list[str]) -> list[set[str]]:
    """What is loaded after each of these command lines, one after another in one process."""
    told = python("-c", IMPORTS.format(lines=lines)).stderr.splitlines()
    return [set(line.split()) for line in told]


def test_help_imports_nothing_slow_and_no_options() -> None:
    (loaded,) = imported_by(["--help"])
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy", "rich", "tokenizers", "safetensors", "pydantic"}
    assert not {name for name in loaded if name.endswith("options")}


def test_help_of_a_command_imports_nothing_slow() -> None:
    lines = [
        [*([] if command.group == ROOT else [command.group]), command.name, "--help"]
        for command in ALL_COMMANDS
    ]
    for line, loaded in zip(lines, imported_by(*lines), strict=True):
        slow = loaded & {"torch", "numpy", "rich", "tokenizers", "safetensors", "aiohttp"}
        assert not slow, line
        assert "paceline.cli.options" in loaded


def test_the_list_of_commands_is_in_sections(cli) -> None:
    _, *sections = cli("--help").out.split("\n\n")[2:]
    listed = {}
    for text in sections[: len(SECTIONS)]:
        title, *lines = text.splitlines()
        listed[title.rstrip(":")] = [line.split()[0] for line in lines]
        assert not any(line.endswith("...") for line in lines)
    assert list(listed) == list(SECTIONS)
    names = [name for section in listed.values() for name in section]
    assert sorted(names) == sorted(
        [*(command.name for command in commands_of(ROOT)), *(set(LABORATORY) - {ROOT})]
    )
    assert {"run": "Use", "run-batch": "Serve", "tune": "Speed up", "bench": "Check"}.items() <= {
        name: section for section, names in listed.items() for name in names
    }.items()
    assert listed["Train"] == ["train"]


@pytest.mark.parametrize("entry", ALL_COMMANDS, ids=lambda entry: entry.work)
def test_what_the_table_names_is_there(entry: Command) -> None:
    assert dataclasses.is_dataclass(load(entry.options))
    assert callable(load(entry.work))


def test_a_mistyped_command_is_suggested(cli) -> None:
    result = cli("train", "drafts")
    assert result.code == 2
    assert "'draft'" in result.err


COMPUTES = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
from paceline.cli.main import main
from paceline.cache.model_runner import ModelRunner
forward = ModelRunner.forward

def first(self, *rest, **more):
    ModelRunner.forward = forward
    print("computes", flush=True)
    return forward(self, *rest, **more)

ModelRunner.forward = first
main(["profile", "embedded", "--budget", "600"])
"""


def test_an_interrupt_while_a_model_computes_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", COMPUTES],
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": SOURCE},
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"computes\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        process.stdout.close()
    assert log.read_text().splitlines()[-1] == "interrupted"
    assert "Traceback" not in log.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    command = [sys.executable, "-m", "paceline", "models"]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: [Errno 28] ")
    assert "Traceback" not in result.stderr


def test_a_name_that_no_file_can_have_is_one_line() -> None:
    result = call("simulate", "x" * 300)
    assert result.returncode == 2
    assert result.stderr.startswith("error: [Errno 36] ")


CLOSED = """
import os, sys
for descriptor in range(3):
    os.close(descriptor)
os.execv(sys.executable, [sys.executable, "-m", "paceline", *sys.argv[1:]])
"""


@pytest.mark.parametrize("command", ["models", "run"])
def test_standard_streams_may_be_closed(command: str) -> None:
    assert python("-c", CLOSED, command).returncode == (0 if command == "models" else 2)


WITHOUT_AIOHTTP = """
import sys
sys.modules["aiohttp"] = None
from paceline.cli.main import main
main(["bench", "serve", "--model", "m"])
"""


def test_benchmarks_of_servers_say_which_extra_they_need() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_AIOHTTP], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert install_command("bench") in line


PROJECT = Path(__file__).resolve().parents[2]


def test_unknown_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ("PACELINE_MAX_TOKENS", "PACELINE_HIDDEN_SIZE", "PACELINE_TEST_X", *OTHER_VARIABLES)
    for name in ("PACELINE_MAX_TOKEN", "PACELINE_QQ", "PACELIN_MAX_TOKENS", *known):
        monkeypatch.setenv(name, "1")
    warn_of_unknown_variables()
    assert capsys.readouterr().err.splitlines() == [
        "warning: nothing reads the variable 'PACELINE_MAX_TOKEN' "
        "(did you mean PACELINE_MAX_TOKENS?)",
        "warning: nothing reads the variable 'PACELINE_QQ'",
    ]


def test_commands_warn_once_and_go_on(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DTYP", "int8")
    result = cli("run", "--config", "absent.json")
    assert result.err.count("did you mean PACELINE_DTYPE?") == 1
    assert "cannot read absent.json" in result.err


def test_what_the_sources_read_is_known() -> None:
    """Every name that the package or its kernels spell out as a string."""
    files = [*(PROJECT / "src").rglob("*.py"), *(PROJECT / "csrc").rglob("*.cpp")]
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
