"""What users of Ollama and llama.cpp type by habit works, or is answered by what to type instead.

The commands are those of ``ollama help`` of 0.12, and of llama.cpp's build 11549, whose ``llama``
has ``cli``, ``serve``, ``bench``, ``quantize``, ``perplexity``, ``version`` and ``help``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import typer

import paceline
from paceline.cli.habits import COMMANDS, OPTIONS, SENTENCES
from paceline.cli.main import app
from tests.cli.conftest import Result

Call = Callable[..., Result]
WORKS = (
    "list",
    "ls",
    "version",
    "--version",
    "-v",
    "help",
    "help run",
    "help ls",
    "--help",
    "pull smollm2",
    "rm smollm2",
    'run smollm2 "Why is the sky blue?"',
    "run model.gguf -p Hello -n 32 --top-k 40 --repeat-penalty 1.1",
    "serve smollm2 --port 11434",
)
ADVISED = {
    "ps": "/api/ps",
    "stop smollm2": "Ctrl-C ends `paceline serve`",
    "create mine -f Modelfile": "models.toml",
    "cp smollm2 mine": "models.toml",
    "push mine": "`paceline serve`",
    "signin": "`paceline models`",
    "show smollm2": "paceline doctor smollm2",
    "run smollm2 --verbose": "paceline run smollm2",
    "run smollm2 --think=false hi": "paceline run smollm2 --no-thinking hi",
    "smollm2": "paceline run smollm2",
    "chat smollm2": "paceline run smollm2",
    "-m model.gguf -p Hello": "paceline run model.gguf -p Hello",
    "ollama run smollm2": "paceline run smollm2",
    "vllm serve smollm2": "paceline serve smollm2",
    "llama-cli -m model.gguf -p Hi -n 32 --temp 0.8 --top-k 40 -c 4096 -t 2 -ngl 99 -sys Short": (
        "paceline run model.gguf -p Hi -n 32 --temperature 0.8 --top-k 40 "
        "--max-model-len 4096 --threads 2 --system Short"
    ),
    "run model.gguf -ngl 99 -fa on -p Hello": "paceline run model.gguf -p Hello",
    "run model.gguf -cnv --temp=0": "paceline run model.gguf --chat --temperature 0",
    "run -hf owner/model -fa --no-mmap": "paceline run owner/model --load-format memory",
    "llama-server -m model.gguf -c 4096 -np 4 -a mine --jinja": (
        "paceline serve model.gguf --max-model-len 4096 --max-num-seqs 4 --served-model-name mine"
    ),
    "serve -m model.gguf -md draft.gguf": "paceline serve model.gguf --draft draft.gguf",
    "serve model --tensor-parallel-size 2": "--pipeline-parallel-size",
    "bench -m model.gguf": "paceline bench throughput model.gguf",
    "bench smollm2": "paceline bench throughput smollm2",
    "perplexity -m model.gguf -f text": "paceline verify --quality model.gguf",
    "quantize model.gguf packed": "paceline convert model.gguf packed",
}


def parse(line: str) -> None:
    """Raises where the command line does not take the line as it is; runs nothing."""
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)
    context = None
    while hasattr(command, "commands"):
        context = command.make_context(command.name, words, parent=context, allow_extra_args=True)
        _, command, words = command.resolve_command(context, words)
    command.make_context(command.name, list(words), parent=context)


@pytest.mark.parametrize("line", [line for line in WORKS if line[0] != "-"])
def test_it_works(line: str) -> None:
    parse(line)


def test_enough_is_known() -> None:
    assert len(WORKS) + len(ADVISED) >= 25


@pytest.mark.parametrize("line", ADVISED)
def test_it_is_answered_by_what_to_type(cli: Call, line: str) -> None:
    result = cli(*shlex.split(line))
    assert (result.code, result.out) == (2, "")
    assert ADVISED[line] in result.err
    for written in re.findall(r"Try: paceline (.*)", result.err):
        parse(written)


def test_advice_names_commands_and_options_that_exist(cli: Call) -> None:
    for name in {*COMMANDS.values(), "run", "serve"}:
        assert cli("help", name.split()[0]).code == 0
    text = " ".join([*SENTENCES.values(), *(habit.why for habit in OPTIONS.values())])
    for name in re.findall(r"`paceline ([a-z]+)", text):
        assert cli("help", name).code == 0
    helps = "".join(cli("help", each).out for each in ("run", "serve", "verify"))
    named = {habit.own.split()[0] for habit in OPTIONS.values() if habit.own.startswith("-")}
    for name in {*named, *re.findall(r"--[a-z-]+", text)}:
        assert re.search(rf"{name}\b", helps), name


def test_what_a_command_has_itself_is_no_habit(cli: Call) -> None:
    """``run-batch`` has --model, and -o."""
    result = cli("run-batch", "--model", "m", "--temp", "1")
    assert "Try: paceline run-batch --model m --temperature 1" in result.err


def test_versions(cli: Call) -> None:
    for words in (["version"], ["-v"], ["--version"]):
        assert cli(*words).out == f"paceline {paceline.__version__}\n"


def test_help_is_that_of_the_command(cli: Call) -> None:
    for words in ([], ["run"], ["bench", "serve"]):
        assert cli("help", *words).out == cli(*words, "--help").out
    result = cli("help", "bench", "nothing")
    assert result.code == 2
    assert "there are serve, throughput" in result.err


def test_a_list_by_other_names(cli: Call) -> None:
    assert cli("list").out == cli("ls").out == cli("models").out != ""
