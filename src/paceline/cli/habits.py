"""What users of other programs type by habit, and how Paceline says it.

Owns the names of Ollama's, llama.cpp's, vLLM's and mlx-lm's commands and options. An option that
means one thing here is taken as that, with a note; anything else is answered by what to type.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import PacelineError

MODEL = "MODEL"
"""Where an option is the argument here, and comes first."""
SWITCH = ("on", "off", "auto", "0", "1")
"""Values that may follow a switch of llama.cpp's, or not."""


class Habit(NamedTuple):
    """What an option of another program is here.

    Attributes:
        own: options that say the same; empty where none is needed, or there is none.
        values: those that may follow it there; None means that one always does.
        why: what takes its place, or why nothing has to.
        is_needless: it may be left out: the answer is the same without it.
    """

    own: str = ""
    values: Collection[str] | None = None
    why: str = ""
    is_needless: bool = False


def _needless(why: str, values: Collection[str] | None = ()) -> Habit:
    return Habit("", values, why, is_needless=True)


_BY_REQUEST = "each request to a server says how it is sampled, or else the model's makers do"
_OPTIONS: dict[tuple[str, ...], Habit] = {
    # llama.cpp's, of build 11549
    ("-m", "--model", "-hf", "-hfr", "--hf-repo"): Habit(MODEL),
    ("-md", "--model-draft", "--spec-draft-model"): Habit("--draft"),
    ("--draft-max", "--draft-n", "--spec-draft-n-max"): Habit("-k"),
    ("--temp",): Habit("--temperature", why=_BY_REQUEST),
    ("-s",): Habit("--seed", why=_BY_REQUEST),
    ("--predict", "--n-predict"): Habit("--max-tokens", why=_BY_REQUEST),
    ("-c", "--ctx-size"): Habit("--max-model-len"),
    ("-t",): Habit("--threads"),
    ("-b", "--batch-size"): Habit("--max-num-batched-tokens"),
    ("-np", "--parallel"): Habit("--max-num-seqs"),
    ("-sys", "--system-prompt"): Habit("--system"),
    ("-r", "--reverse-prompt"): Habit("--stop"),
    ("-cnv", "--conversation"): Habit("--chat", ()),
    ("-no-cnv", "--no-conversation"): Habit("--no-chat", ()),
    ("-st", "--single-turn"): _needless("a prompt on the command line is answered once"),
    ("--no-display-prompt",): _needless("the prompt is not printed"),
    ("-j", "-jf", "--json-schema-file"): Habit(
        "--json-schema", why="each request to a server brings its own schema, as response_format"
    ),
    ("--format",): Habit(why="--json-schema makes answers match a schema"),
    ("-f", "--file"): Habit("--text", why="< FILE behind the command makes a prompt of a file"),
    ("-a", "--alias"): Habit("--served-model-name"),
    ("-to", "--timeout"): Habit("--request-timeout"),
    ("--cors-origins",): Habit("--allowed-origins"),
    ("--chat-template-file",): Habit("--chat-template"),
    ("--chat-template-kwargs",): Habit("--default-chat-template-kwargs"),
    ("--models-max",): Habit("--max-loaded-models"),
    ("--no-mmap",): Habit("--load-format memory", ()),
    ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"): Habit(
        why="--kv-cache-dtype sets the precision of keys and values together"
    ),
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): _needless(
        "--device sets where all layers run", values=None
    ),
    ("-dev",): Habit("--device"),
    ("-fa", "--flash-attn"): _needless("attention needs no choice", SWITCH),
    ("--jinja",): _needless("chat templates are always applied"),
    ("-cb", "--cont-batching"): _needless("batching is always continuous"),
    ("--metrics",): _needless("a server always has /metrics"),
    ("-co", "--color"): _needless("a terminal always gets colours", SWITCH),
    ("-tb", "--threads-batch"): _needless("--threads is for prompts, too", values=None),
    ("-ub", "--ubatch-size"): _needless("a forward pass is not cut further", values=None),
    ("--no-context-shift",): _needless("a full context is never shifted"),
    ("--no-warmup",): _needless("there is no warm-up"),
    ("--log-disable",): _needless("logs go to standard error"),
    ("--mlock",): _needless("weights stay in memory as long as there is room"),
    # Ollama's
    ("-v", "--verbose"): _needless("figures follow each answer"),
    ("--keepalive",): Habit("--keep-alive"),
    ("--think=false",): Habit("--no-thinking", ()),
    ("--think",): _needless("models that can think do"),
    ("--hidethinking",): Habit(values=(), why="--no-thinking asks the model for no thoughts"),
    ("--nowordwrap",): Habit(values=(), why="/set nowordwrap in a chat ends lines at the edge"),
    ("--num-ctx",): Habit("--max-model-len"),
    ("--num-predict",): Habit("--max-tokens"),
    # vLLM's and mlx-lm's
    ("--tensor-parallel-size", "-tp"): Habit(
        why="--pipeline-parallel-size splits the layers among processes"
    ),
    ("--gpu-memory-utilization",): Habit(why="--kv-cache-memory and --weight-memory limit memory"),
    ("--quantization", "-q"): Habit(why="--dtype int8 or int4 quantises the weights"),
    ("--speculative-model",): Habit("--draft"),
    ("--lora-modules", "--adapter-path"): Habit("--lora"),
    ("--ignore-chat-template",): Habit("--no-chat", ()),
    ("--max-new-tokens",): Habit("--max-tokens"),
    ("--trust-remote-code",): _needless("no code of a model is ever run"),
    ("--enforce-eager",): _needless("there are no graphs to capture"),
    ("--enable-chunked-prefill",): _needless("long prompts are always read in chunks"),
    ("--enable-lora",): _needless("--lora is enough"),
    ("--enable-auto-tool-choice",): _needless("tools are always available"),
}
OPTIONS = {name: habit for names, habit in _OPTIONS.items() for name in names}

_NAMED = "An entry of models.toml gives a file a name, and `paceline convert` packs a model"
_CATALOGUE = "No account is needed: `paceline models` lists what can be downloaded"
COMMANDS = {
    **dict.fromkeys(("chat", "cli", "client", "llama-cli", "llama-completion", "generate"), "run"),
    **dict.fromkeys(("start", "server", "llama-server", "api_server"), "serve"),
    **dict.fromkeys(("llama-bench", "benchmark"), "bench throughput"),
    **dict.fromkeys(("perplexity", "llama-perplexity"), "verify --quality"),
    **dict.fromkeys(("quantize", "llama-quantize", "pack"), "convert"),
    "compare": "run --compare",
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
    "push": "Paceline publishes no models; other hosts can use one that `paceline serve` serves",
    "update": "Update Paceline the way you installed it; `paceline version` prints the version",
    **dict.fromkeys(("signin", "signout", "login", "logout"), _CATALOGUE),
    "tokenize": "A server tokenizes: POST /tokenize, after `paceline serve MODEL`",
    "embed": "A server embeds texts: POST /v1/embeddings, after `paceline serve MODEL`",
}
"""Commands of other programs that are none here, and what takes their place."""
_USUAL = {"": "run", "bench": "bench throughput"}
"""What is meant where a model follows a group's words."""


class Own(NamedTuple):
    """What a command of ours takes.

    Attributes:
        words: those that lead to it, without the program's name.
        options: its options, long and short, and whether a value follows.
        has_model: whether its first argument is a model.
    """

    words: Sequence[str]
    options: Mapping[str, bool]
    has_model: bool


@dataclass
class Reading:
    """A command line of another program's in Paceline's words.

    Attributes:
        models: values of options that are the argument MODEL here; they come first.
        others: all other words.
        notes: what was read as something else, or left out as needless.
        unmet: what cannot be said here, and what takes its place.
    """

    own: Own
    models: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unmet: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return [*self.models, *self.others]

    @property
    def unknown(self) -> str:
        """The first option that cannot be said here; empty where there is none."""
        return next(iter(self.unmet), "").partition(":")[0].partition(" ")[0]

    @property
    def advice(self) -> str:
        """What to type, and what became of options that are left out."""
        line = shlex.join(["paceline", *self.own.words, *self.words])
        remarks = [note for note in self.notes if ": " in note]
        return "\n  ".join([f"Try: {line}", *dict.fromkeys([*self.unmet, *remarks])])

    def add(self, name: str, habit: Habit, value: str | None) -> None:
        """Take an option of another program, and the value that follows it, if any."""
        values = [] if value is None else [value]
        flag, *fixed = habit.own.split() or [""]
        if habit.is_needless:
            self.notes.append(f"{name} is left out: {habit.why}")
        elif habit.values is None and value is None:
            self.unmet.append(f"{name} needs a value")
        elif flag == MODEL and self.own.has_model:
            self.notes.append(f"{name} is the argument MODEL here")
            self.models += values
        elif flag in self.own.options:
            self.notes.append(f"{name} is {habit.own} here")
            self.others += [flag, *fixed, *values]
        else:
            why = habit.why or f"`paceline {' '.join(self.own.words)}` has no such option"
            self.unmet.append(f"{name}: {why}")


def read(words: Sequence[str], own: Own) -> Reading:
    """What follows a command, with other programs' options in Paceline's words.

    What stands behind ``--`` or is the value of an option of the command itself is left as it is.
    """
    reading, left = Reading(own), list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            reading.others += [word, *left]
            break
        name, sign, value = word.partition("=")
        habit = _habit(word, own)
        if habit is None:
            reading.others.append(word)
            if own.options.get(word) and left:
                reading.others.append(left.pop(0))
        elif sign or not _follows(habit, left, own):
            reading.add(name, habit, value if sign and habit.values is None else None)
        else:
            value = left.pop(0)
            reading.add(name, habit, value if habit.values is None else None)
    return reading


def _habit(word: str, own: Own) -> Habit | None:
    name = word if word in OPTIONS or not word.startswith("--") else word.partition("=")[0]
    return None if name in own.options else OPTIONS.get(name)


def _follows(habit: Habit, left: Sequence[str], own: Own) -> bool:
    """Whether the next word belongs to an option."""
    if not left or left[0] in own.options or left[0] in OPTIONS:
        return False
    return habit.values is None or left[0] in habit.values


def advice_on_command(
    words: Sequence[str], group: Sequence[str], find: Callable[[Sequence[str]], Own | None]
) -> str:
    """What to type instead of a command that does not exist; empty where nothing is known.

    Args:
        words: the command, and what follows it.
        group: the words that lead to its group, without the program's name.
        find: what a command of ours takes; None where there is no such command.
    """
    name, *rest = words
    if name in PROGRAMS and rest:
        same = _written(rest[0], rest[1:], find)
        return advice_on_command(rest, group, find) or same
    if name in SENTENCES:
        return SENTENCES[name]
    if name in COMMANDS:
        return _written(COMMANDS[name], rest, find)
    usual = _USUAL.get(" ".join(group))
    is_meant = usual and (name in OPTIONS or (not name.startswith("-") and _is_model(name)))
    return _written(usual, words, find) if usual and is_meant else ""


def _written(
    command: str, words: Sequence[str], find: Callable[[Sequence[str]], Own | None]
) -> str:
    """Advice to type a command of ours, such as ``verify --quality``, with what follows."""
    *path, last = command.split()
    fixed = [last] if last.startswith("-") else []
    own = find(path if fixed else [*path, last])
    return "" if own is None else read([*fixed, *words], own).advice


def _is_model(name: str) -> bool:
    from paceline.loading.catalogue import find_model  # which other command lines need not wait for

    with suppress(PacelineError, OSError, ValueError):
        return Path(name).exists() or find_model(name) is not None
    return False
