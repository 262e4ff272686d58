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
from paceline.cli.habits import COMMANDS, OPTIONS, SENTENCES, read
from paceline.cli.main import app
from paceline.cli.options import UNLIMITED
from paceline.cli.registry import own_words
from paceline.core.errors import ConfigError
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
READ_AS = {
    "run smollm2 --verbose": "run smollm2",
    "run smollm2 --think=false hi": "run smollm2 --no-thinking hi",
    "run model.gguf -ngl 99 -fa on -p Hello": "run model.gguf -p Hello",
    "run model.gguf -fa -p Hello": "run model.gguf -p Hello",
    "run model.gguf -cnv --temp=0": "run model.gguf --chat --temperature 0",
    "run -m model.gguf Hello": "run model.gguf Hello",
    "run -hf owner/model -fa --no-mmap": "run owner/model --load-format memory",
    "run model.gguf -n -1 -s -1 -c 0": "run model.gguf -n -1 --seed -1 --max-model-len 0",
    "run model.gguf -tb 4 -ub 512 --no-warmup -v -n 3": "run model.gguf -n 3",
    "run model --adapter-path folder --ignore-chat-template": "run model --lora folder --no-chat",
    "serve -m model.gguf -md draft.gguf": "serve model.gguf --draft draft.gguf",
    "serve model --timeout 60 --enable-auto-tool-choice": "serve model --request-timeout 60",
    "verify --quality -m model.gguf -f text": "verify model.gguf --quality --text text",
    "run-batch --model m -np 4": "run-batch --model m --max-num-seqs 4",
}
"""Options that mean one thing here, and the line that they are read as."""
ADVISED = {
    "ps": "/api/ps",
    "stop smollm2": "Ctrl-C ends `paceline serve`",
    "create mine -f Modelfile": "models.toml",
    "cp smollm2 mine": "models.toml",
    "push mine": "`paceline serve`",
    "signin": "`paceline models`",
    "show smollm2": "paceline doctor smollm2",
    "smollm2": "paceline run smollm2",
    "chat smollm2": "paceline run smollm2",
    "-m model.gguf -p Hello": "paceline run model.gguf -p Hello",
    "ollama run smollm2": "paceline run smollm2",
    "vllm serve smollm2": "paceline serve smollm2",
    "llama-cli -m model.gguf -p Hi -n 32 --temp 0.8 --top-k 40 -c 4096 -t 2 -ngl 99 -sys Short": (
        "paceline run model.gguf -p Hi -n 32 --temperature 0.8 --top-k 40 "
        "--max-model-len 4096 --threads 2 --system Short"
    ),
    "llama-server -m model.gguf -c 4096 -np 4 -a mine --jinja": (
        "paceline serve model.gguf --max-model-len 4096 --max-num-seqs 4 --served-model-name mine"
    ),
    "serve model -tp 2 -c 4096": "paceline serve model --max-model-len 4096\n  -tp: --pipeline-par",
    "serve model --temp 0.5": "Try: paceline serve model\n  --temp: each request to a server says",
    "run model -a mine -p Hi": "No such option: -a. Try: paceline run model -p Hi",
    "run model -p": "requires an argument",
    "run -m": "-m needs a value",
    "run model -kvu": "No such option: -kvu",
    "bench -m model.gguf": "paceline bench throughput model.gguf",
    "bench smollm2": "paceline bench throughput smollm2",
    "perplexity -m model.gguf -f text": "paceline verify model.gguf --quality --text text",
    "quantize model.gguf packed": "paceline convert model.gguf packed",
}


def parse(line: str) -> tuple[str, dict[str, Any]]:
    """The command that a line is taken for, and its options; runs nothing.

    Raises where the command line does not take it as it is.
    """
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)
    context = None
    while hasattr(command, "commands"):
        context = command.make_context(command.name, words, parent=context, allow_extra_args=True)
        _, command, words = command.resolve_command(context, words)
    return command.name, command.make_context(command.name, list(words), parent=context).params


@pytest.mark.parametrize("line", READ_AS)
def test_an_option_that_means_one_thing_is_read_as_that(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    read = parse(line)
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: ")
    assert read == parse(READ_AS[line])
    assert capsys.readouterr().err == ""


def test_a_value_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    """What stands behind an option of the command itself, or behind two dashes."""
    _, options = parse("run model -p --temp --stop -s -- -m")
    assert (options["prompt"], options["stop"], options["question"]) == ("--temp", ["-s"], ["-m"])
    assert capsys.readouterr().err == ""


def test_numbers_that_elsewhere_mean_as_many_as_there_are() -> None:
    _, options = parse("run model -n -1 --threads -1 --max-model-len 0 --max-num-seqs -1")
    assert options["max_tokens"] == parse("run model -n -2")[1]["max_tokens"] == UNLIMITED
    assert {options[name] for name in ("threads", "max_model_len", "max_num_seqs")} == {None}
    for command in ("trace", "tune", "explain", "verify"):
        needed = {"trace": " --prompts p -o o", "explain": " -p x"}.get(command, "")
        assert parse(f"{command} model --max-tokens -1{needed}")[1]["max_tokens"] == UNLIMITED
    with pytest.raises(ConfigError, match="--max-tokens is -3; allowed: whole numbers from 1, and"):
        parse("run model -n -3")


@pytest.mark.parametrize("line", [line for line in WORKS if line[0] != "-"])
def test_it_works(line: str) -> None:
    parse(line)


def test_enough_is_known() -> None:
    assert len(WORKS) + len(READ_AS) + len(ADVISED) >= 25


@pytest.mark.parametrize("line", ADVISED)
def test_it_is_answered_by_what_to_type(cli: Call, line: str) -> None:
    result = cli(*shlex.split(line))
    assert (result.code, result.out) == (2, "")
    assert ADVISED[line] in result.err
    for written in re.findall(r"Try: paceline (.*)", result.err):
        parse(written)


def test_advice_behind_a_question_is_a_sentence_of_its_own(cli: Call) -> None:
    error = cli("server", "smollm2").err
    assert "No such command 'server'. Did you mean 'serve'? Try: paceline serve smollm2" in error


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
    """``run-batch`` has --model, but does not sample."""
    result = cli("run-batch", "--model", "m", "--temp", "1")
    assert "Try: paceline run-batch --model m\n" in result.err


@pytest.mark.parametrize("command", ["run", "serve", "verify", "explain", "tune", "bench serve"])
def test_advice_is_a_line_that_the_command_takes(command: str) -> None:
    found: Any = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]
    own = own_words(found, command.split())
    for name, habit in OPTIONS.items():
        reading = read([name, *(["1"] if habit.values is None else [])], own)
        assert len(reading.words) <= 2
        flags = [word for word in reading.words if word.startswith("-")]
        assert set(flags) <= set(own.options), name


def test_versions(cli: Call) -> None:
    for words in (["version"], ["-v"], ["--version"]):
        assert cli(*words).out == f"paceline {paceline.__version__}\n"


def test_help_is_that_of_the_command(cli: Call) -> None:
    for words in ([], ["run"], ["bench", "serve"]):
        assert cli("help", *words).out == cli(*words, "--help").out
    for line in (["help", "bench", "nothing"], ["bench", "nothing"]):
        result = cli(*line)
        assert result.code == 2
        assert "No such command 'nothing'. There are serve, throughput" in result.err


def test_a_list_by_other_names(cli: Call) -> None:
    assert cli("list").out == cli("ls").out == cli("models").out != ""
