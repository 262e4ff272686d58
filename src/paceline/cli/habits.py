"""What users of other programs type by habit, and how Paceline says it.

Owns the names of Ollama's, llama.cpp's and vLLM's commands and options, and the advice on a command
line that has them. Changes no command line: whoever typed it reads the advice, and types again.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import PacelineError

MODEL = "MODEL"
"""Where an option is the argument here, and comes first."""


class Habit(NamedTuple):
    """What an option of another program is here.

    Attributes:
        own: options that say the same; empty where none is needed, or there is none.
        has_value: whether a value follows it there.
        why: what takes its place, if something does.
    """

    own: str
    has_value: bool = True
    why: str = ""


_OPTIONS: dict[tuple[str, ...], Habit] = {
    # llama.cpp's, of build 11549
    ("-m", "--model", "-hf", "-hfr", "--hf-repo"): Habit(MODEL),
    ("-md", "--model-draft", "--spec-draft-model"): Habit("--draft"),
    ("--draft-max", "--draft-n", "--spec-draft-n-max"): Habit("-k"),
    ("--temp",): Habit("--temperature"),
    ("-s",): Habit("--seed"),
    ("--predict", "--n-predict"): Habit("--max-tokens"),
    ("-c", "--ctx-size", "--num-ctx"): Habit("--max-model-len"),
    ("-t",): Habit("--threads"),
    ("-b", "--batch-size"): Habit("--max-num-batched-tokens"),
    ("-np", "--parallel"): Habit("--max-num-seqs"),
    ("-sys", "--system-prompt"): Habit("--system"),
    ("-r", "--reverse-prompt"): Habit("--stop"),
    ("-cnv", "--conversation"): Habit("--chat", has_value=False),
    ("-no-cnv", "--no-conversation"): Habit("--no-chat", has_value=False),
    ("-jf", "--json-schema-file", "--format"): Habit(
        "", why="--json-schema FILE holds answers to a schema"
    ),
    ("-f", "--file"): Habit(
        "", why="a prompt may come by standard input, < FILE; --text FILE is what is measured"
    ),
    ("-a", "--alias"): Habit("--served-model-name"),
    ("--cors-origins",): Habit("--allowed-origins"),
    ("--chat-template-file",): Habit("--chat-template"),
    ("--chat-template-kwargs",): Habit("--default-chat-template-kwargs"),
    ("--models-max",): Habit("--max-loaded-models"),
    ("--no-mmap",): Habit("--load-format memory", has_value=False),
    ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"): Habit(
        "", why="--kv-cache-dtype says how keys and values are kept"
    ),
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): Habit("", why="--device says where layers compute"),
    ("-dev",): Habit("--device"),
    ("-fa", "--flash-attn"): Habit("", why="attention is chosen by itself"),
    ("--jinja",): Habit("", has_value=False, why="chat templates are always read"),
    ("-cb", "--cont-batching"): Habit("", has_value=False, why="batching is always continuous"),
    ("--metrics",): Habit("", has_value=False, why="a server always has /metrics"),
    ("-co", "--color"): Habit(""),
    ("--mlock",): Habit("", has_value=False),
    # Ollama's
    ("--verbose",): Habit("", has_value=False, why="figures follow each answer"),
    ("--keepalive",): Habit("--keep-alive"),
    ("--think=false",): Habit("--no-thinking", has_value=False),
    ("--think", "--hidethinking", "--nowordwrap"): Habit("", has_value=False),
    # vLLM's
    ("--tensor-parallel-size", "-tp"): Habit(
        "", why="--pipeline-parallel-size splits the layers among processes"
    ),
    ("--gpu-memory-utilization",): Habit(
        "", why="--kv-cache-memory and --weight-memory limit memory"
    ),
    ("--quantization", "-q"): Habit("", why="--dtype int8 or int4 packs weights"),
    ("--trust-remote-code", "--enforce-eager"): Habit("", has_value=False),
}
OPTIONS = {name: habit for names, habit in _OPTIONS.items() for name in names}

_NAMED = "An entry of models.toml gives a file a name, and `paceline convert` packs a model"
_CATALOGUE = "No account is needed: `paceline models` lists what can be fetched"
COMMANDS = {
    **dict.fromkeys(("chat", "cli", "client", "llama-cli", "llama-completion", "generate"), "run"),
    **dict.fromkeys(("start", "server", "llama-server", "api_server"), "serve"),
    **dict.fromkeys(("llama-bench", "benchmark"), "bench throughput"),
    **dict.fromkeys(("perplexity", "llama-perplexity"), "verify --quality"),
    **dict.fromkeys(("quantize", "llama-quantize"), "convert"),
    **dict.fromkeys(("download", "get", "fetch", "install"), "pull"),
    **dict.fromkeys(("remove", "delete"), "rm"),
    **dict.fromkeys(("show", "info", "inspect"), "doctor"),
}
"""Commands of other programs, and ours that do the same."""
PROGRAMS = ("ollama", "vllm", "lms")
"""Programs whose whole command lines are typed behind ours."""
SENTENCES = {
    "ps": "A server says which models it has loaded: curl http://127.0.0.1:8000/api/ps",
    "stop": "Ctrl-C ends `paceline serve`; with --keep-alive 5m it unloads models that are idle",
    "create": _NAMED,
    "cp": _NAMED,
    "push": "Paceline publishes no models; `paceline serve` lends one to other hosts",
    "update": "Whatever installed Paceline updates it; `paceline version` says which it is",
    **dict.fromkeys(("signin", "signout", "login", "logout"), _CATALOGUE),
    "tokenize": "A server tokenizes: POST /tokenize, after `paceline serve MODEL`",
    "embed": "A server embeds texts: POST /v1/embeddings, after `paceline serve MODEL`",
}
"""Commands of other programs that are none here, and what takes their place."""
_USUAL = {"": "run", "bench": "bench throughput"}
"""What is meant where a model follows a group's words."""


def advice_on_command(words: Sequence[str], group: Sequence[str]) -> str:
    """What to type instead of a command that a group has not; empty where nothing is known.

    Args:
        words: the command, and what follows it.
        group: the words that lead to the group, without the program's name.
    """
    name, *rest = words
    if name in PROGRAMS and rest:
        return advice_on_command(rest, group) or _written(rest[:1], rest[1:])
    if name in SENTENCES:
        return SENTENCES[name]
    if name in COMMANDS:
        return _written(COMMANDS[name].split(), rest)
    usual = _USUAL.get(" ".join(group))
    is_meant = usual and (name in OPTIONS or (not name.startswith("-") and _is_model(name)))
    return _written(usual.split(), words) if usual and is_meant else ""


def advice_on_options(command: Sequence[str], words: Sequence[str], own: Collection[str]) -> str:
    """How to write a command's options that other programs have; empty where there is none.

    Args:
        command: the words that lead to it, without the program's name.
        words: what follows.
        own: options of the command itself, which mean what they say.
    """
    is_foreign = any(_habit(word, own) is not None for word in words)
    return _written(command, words, own) if is_foreign else ""


def _written(command: Sequence[str], words: Iterable[str], own: Collection[str] = ()) -> str:
    """A command line in Paceline's words, and what became of those that it leaves out."""
    models: list[str] = []
    others: list[str] = []
    remarks = []
    left = list(words)
    while left:
        word = left.pop(0)
        habit = _habit(word, own)
        if habit is None:
            others.append(word)
            continue
        name, sign, value = word.partition("=")
        if habit.has_value and not sign and left and left[0] not in OPTIONS:
            value = left.pop(0)
        values = [value] if habit.has_value else []
        if habit.own == MODEL:
            models += values
        elif habit.own:
            others += [*habit.own.split(), *values]
        elif habit.why:
            remarks.append(f"{name}: {habit.why}")
    line = shlex.join(["paceline", *command, *models, *others])
    return "\n  ".join([f"Try: {line}", *dict.fromkeys(remarks)])


def _habit(word: str, own: Collection[str]) -> Habit | None:
    if word.startswith("--") and word not in OPTIONS:
        word = word.partition("=")[0]
    return None if word in own else OPTIONS.get(word)


def _is_model(name: str) -> bool:
    from paceline.loading.names import find_model  # which other command lines need not wait for

    with suppress(PacelineError, OSError, ValueError):
        return Path(name).exists() or find_model(name) is not None
    return False
