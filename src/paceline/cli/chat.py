"""The chat in a terminal: a conversation, and what a person types in it.

Owns the turns, the commands (which have Ollama's names) and the history of what was typed. Knows no
terminal: it is given what reads a line.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.api.outputs import Completion
from paceline.cli.prompts import Encoder
from paceline.cli.report import (
    Figures,
    answer_line,
    banner,
    closing_line,
    cut_line,
    sampling_line,
    stream_answer,
)
from paceline.cli.terminal import Screen, printable
from paceline.core.errors import (
    ConfigError,
    ContextLengthError,
    PacelineError,
    RequestError,
    ShapeError,
)
from paceline.core.files import whole_file
from paceline.core.folders import state_folder
from paceline.request.sampling_params import SamplingParams
from paceline.request.structured_outputs import StructuredOutputs
from paceline.server.chat.harmony import words_of

if TYPE_CHECKING:
    from paceline.api.llm import LLM


WAYS_ON = (
    "/clear starts a new conversation, /drop drops the oldest turns, and /set drop does that by "
    "itself from here on"
)
ROOM = 4
"""Turns are dropped until such a part of the context is free for the answer."""


@dataclass(slots=True)
class TerminalChat:
    """A conversation: its turns so far, and what was set about it.

    Attributes:
        unanswered: the last question, where the context had no room for it.
        keeps_typed: whether what is typed is kept for later sessions.
        drops: whether the oldest turns go when the context is full.
        last, all: figures of the last answer, and of all answers.
    """

    llm: LLM
    encoder: Encoder
    params: SamplingParams
    screen: Screen
    lora: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    unanswered: str | None = None
    shows_figures: bool = True
    keeps_typed: bool = True
    drops: bool = False
    last: Figures = field(default_factory=Figures)
    all: Figures = field(default_factory=Figures)

    @property
    def context(self) -> int:
        """Tokens that the model holds."""
        tokens: int | None = self.llm.config.max_model_len
        assert tokens is not None
        return tokens

    def ask(self, text: str) -> None:
        """Answer a message, and remember both; ``RequestError`` if it cannot be answered."""
        prompt = self._prompt(text)
        figures = Figures()
        try:
            answer = stream_answer(
                self.llm, prompt, self.params, self.screen, figures, True, self.lora
            )
        except ContextLengthError:
            if not self.messages:
                raise
            self.unanswered = text
            self.screen.note(f"the context of {self.context} tokens is full: {WAYS_ON}")
            return
        self.unanswered = None
        (completion,) = answer.completions
        self._count(completion, figures)
        if self.encoder.uses_chat:
            answered = {"role": "assistant", "content": words_of(answer.text)}
            self.messages += [_question(text), answered]

    def make_room(self, text: str | None) -> int:
        """Drop the oldest turns until there is room for an answer; returns how many were dropped.

        Args:
            text: the next message, if there is one.
        """
        most = self.context - self.context // ROOM
        next_one = [] if text is None else [_question(text)]
        before = len(self.messages)
        while self.messages and len(self.encoder.encode([*self.messages, *next_one])) > most:
            del self.messages[:2]
        return (before - len(self.messages)) // 2

    def _prompt(self, text: str) -> list[int]:
        if not self.encoder.uses_chat:
            return self.encoder.encode(text)
        if self.drops and (dropped := self.make_room(text)):
            self.screen.note(f"dropped the oldest {counted(dropped)}")
        return self.encoder.encode([*self.messages, _question(text)])

    def _count(self, completion: Completion, figures: Figures) -> None:
        self.last = figures
        self.all.add_figures(figures)
        cut = cut_line(completion, self.params, self.context)
        if cut is not None:
            is_full = self.encoder.uses_chat and len(completion.token_ids) != self.params.max_tokens
            self.screen.note(f"{cut}: {WAYS_ON}" if is_full else cut)
        if self.shows_figures:
            self.screen.note(answer_line(figures, completion.time_to_first_token))


def counted(turns: int) -> str:
    return f"{turns} turn{'s' * (turns != 1)}"


def _question(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


PROMPT = "> "
NEXT_LINE = "... "
QUOTES = '"""'
LEAVING = {"exit", "quit"}
"""Words that leave, as ``/bye`` does, where they are all that is typed."""
_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)
_OPENED = re.compile(r'(\s*(?:/set\s+system\s+|/system\s+)?)"""')

Read = Callable[[str], str]
"""Asks for a line, behind a prompt; raises EOFError or KeyboardInterrupt where there is none."""


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """``/name argument``."""

    name: str
    argument: str = ""

    def __str__(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


def typed(read: Read) -> str | ChatCommand:
    """The next message, which is never a command where it is quoted or has several lines.

    As in Ollama, a text between triple quotes may have several lines; so may a paste.

    Raises:
        EOFError: nothing more comes.
        KeyboardInterrupt: what was typed is given up.
    """
    line = read(PROMPT).rstrip("\n")
    opened = _OPENED.match(line)
    if opened is None or ("\n" in line and not line.rstrip().endswith(QUOTES)):
        return line if "\n" in line.strip() else _single(line)
    text = _quoted(line[opened.end() :], read)
    return _single(opened[1].strip() + " " + text) if opened[1].strip() else text


def _quoted(begun: str, read: Read) -> str:
    """What stands between quotes, of which the first are passed."""
    lines = [begun]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(read(NEXT_LINE))
    return "\n".join(lines).rstrip().removesuffix(QUOTES)


def _single(line: str) -> str | ChatCommand:
    words = line.strip()
    if words in LEAVING:
        return ChatCommand("bye")
    match = _COMMAND.fullmatch(words)
    return ChatCommand(match[1], (match[2] or "").strip()) if match else line


Remember = Callable[[str], None]


def talk(conversation: TerminalChat, read: Read, remember: Remember = lambda text: None) -> int:
    """Hold a conversation until input ends, and remember what is typed; returns the exit code."""
    screen = conversation.screen
    uses_chat = conversation.encoder.uses_chat
    subject = "chat" if uses_chat else "texts to continue (the model has no chat template)"
    screen.note(f"{subject}; Ctrl-C ends an answer, Ctrl-D or /bye leaves, /? helps")
    screen.legend()
    while True:
        try:
            asked = typed(read)
        except EOFError:
            screen.say("")
            return 0
        except KeyboardInterrupt:
            screen.say("")
            screen.note("Ctrl-D or /bye leaves")
            continue
        if conversation.keeps_typed and str(asked).strip():
            remember(str(asked))
        try:
            if isinstance(asked, ChatCommand):
                if not carry_out(conversation, asked):
                    return 0
            elif asked.strip():
                conversation.ask(asked)
        except ShapeError:  # the command line's: no other message would do better
            raise
        except (RequestError, ConfigError) as error:
            screen.note(f"error: {error}")


HELP = """\
/set                    list the settings, such as /set system TEXT or /set parameter
/show                   list what can be shown, such as /show parameters
/system TEXT            short for /set system TEXT; /system shows the system message
/stats                  speed and acceptance of the last answer and of all answers
/clear                  start a new conversation
/drop                   drop the oldest turns, then answer the message that did not fit
/bye, /exit, exit       leave
/?, /help               show this list

Put \"\"\" before and after a message of several lines, or one that begins with a slash. Pasted
text is one message, however many lines it has."""
SET_HELP = """\
/set system TEXT             set the system message; /set nosystem removes it
/set parameter NAME VALUE    change how answers are sampled; /set parameter lists the names
/set think, nothink          ask the chat template for thoughts, or for none
/set format json, noformat   answer with a JSON object, or with any text
/set verbose, quiet          show or hide the figures after each answer
/set wordwrap, nowordwrap    break lines between words, or at the edge
/set history, nohistory      keep what is typed for later chats, or do not
/set drop, nodrop            drop the oldest turns when the context is full, or stop there"""
SHOW_HELP = """\
/show info          the model, how it runs, and how answers are sampled
/show system        the system message
/show parameters    the values that /set parameter changes
/show template      the model's chat template"""


def _count(value: str) -> int | None:
    number = int(value)
    return None if number < 0 else number


PARAMETERS: Mapping[str, tuple[str, Callable[[str], Any], str]] = {
    "temperature": ("temperature", float, "0 always picks the most likely token"),
    "top_k": ("top_k", int, "sample from this many of the most likely tokens"),
    "top_p": ("top_p", float, "sample from the most likely tokens up to this probability"),
    "min_p": ("min_p", float, "sample from tokens at least this likely"),
    "seed": ("seed", int, "repeat an answer; -1 draws a seed"),
    "num_predict": ("max_tokens", _count, "maximum tokens per answer; -1 is no limit"),
    "stop": ("stop", str.split, "end the answer before one of these texts"),
    "repeat_penalty": ("repetition_penalty", float, "divisor for repeated tokens; 1 is none"),
    "presence_penalty": ("presence_penalty", float, "subtracted from used tokens; 0 is none"),
    "frequency_penalty": ("frequency_penalty", float, "the same for each time; 0 is none"),
}
"""By Ollama's name: ours, how a value is read, and what it does."""
_NO_CHANGE = "is fixed while a model is loaded: start again with"
NOT_HERE: Mapping[str, str] = {
    "num_ctx": f"num_ctx {_NO_CHANGE} --max-model-len N",
    "num_gpu": f"num_gpu {_NO_CHANGE} --device, which sets where all layers run",
    "num_thread": f"num_thread {_NO_CHANGE} --threads N",
    "num_batch": f"num_batch {_NO_CHANGE} --max-num-batched-tokens N",
    "repeat_last_n": "repeat_last_n is not here: repeat_penalty looks at the whole text",
    "max_tokens": "max_tokens is num_predict here",
}
"""Parameters of Ollama's and of ours that a chat cannot change, and what does."""
_ELSEWHERE = {
    "load": "a chat keeps its model: leave with /bye, then paceline run MODEL",
    "save": "chats are not saved: /show and the terminal's own scrollback have what was said",
    "regen": "/set parameter seed N, then ask again: with the same seed the answer is the same",
    "read": "a file is read from a pipe: paceline run MODEL -p QUESTION < FILE",
    **dict.fromkeys(("image", "audio", "video"), "models read text alone here"),
}
"""Commands of Ollama's and llama.cpp's chats, and what takes their place."""
_LISTED = '; /? lists the commands, and """/...""" sends a message that begins with a slash'


def carry_out(talk: TerminalChat, command: ChatCommand) -> bool:
    """Do what a command says; returns whether the conversation goes on.

    Raises:
        RequestError: it cannot be done.
    """
    if command.name in ("bye", "exit", "quit"):
        return False
    work = _COMMANDS.get(command.name)
    if work is None:
        name = printable(command.name)
        raise RequestError(_ELSEWHERE.get(name, f"there is no command /{name}") + _LISTED)
    work(talk, command.argument)
    return True


def _help(talk: TerminalChat, _: str) -> None:
    talk.screen.note(HELP)


def _clear(talk: TerminalChat, _: str) -> None:
    talk.messages.clear()
    talk.unanswered = None
    talk.screen.note("the conversation is forgotten")


def _drop(talk: TerminalChat, _: str) -> None:
    dropped = talk.make_room(talk.unanswered)
    left = len(talk.messages) // 2
    talk.screen.note(f"dropped the oldest {counted(dropped)}; {counted(left)} left")
    if talk.unanswered is not None:
        talk.ask(talk.unanswered)


def _stats(talk: TerminalChat, _: str) -> None:
    talk.screen.note(f"last answer: {closing_line(talk.last)}")
    talk.screen.note(f"all answers: {closing_line(talk.all)}")


def _system(talk: TerminalChat, text: str) -> None:
    if text:
        _set_system(talk, text)
    else:
        _show_system(talk)


def _set(talk: TerminalChat, text: str) -> None:
    name, _, value = text.partition(" ")
    change = _SETTINGS.get(name)
    if change is None:
        talk.screen.note(SET_HELP)
    else:
        change(talk, value.strip())


def _set_system(talk: TerminalChat, text: str) -> None:
    if not talk.encoder.uses_chat:
        raise RequestError("the model has no chat template, so there is no system message")
    talk.encoder = replace(talk.encoder, system=_unquoted(text) or None)
    talk.screen.note("the system message is set" if text else "there is no system message")


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _set_parameter(talk: TerminalChat, text: str) -> None:
    name, _, value = text.partition(" ")
    if not value.strip() and (not name or name in PARAMETERS):
        for known, (_, _, help) in PARAMETERS.items():
            talk.screen.note(f"{f'/set parameter {known} VALUE':<40}{help}")
        return
    if name not in PARAMETERS:
        unknown = f"there is no parameter {name!r}; allowed: {', '.join(PARAMETERS)}"
        raise RequestError(NOT_HERE.get(name, unknown))
    field, read, _ = PARAMETERS[name]
    try:
        given = read(_unquoted(value.strip()))
    except ValueError as error:
        raise RequestError(f"{name} is {value.strip()!r}; allowed: a number") from error
    talk.params = replace(talk.params, **{field: given})
    talk.screen.note(f"{name} is {given if given is not None else 'without a limit'}")


def _set_thinking(talk: TerminalChat, wanted: bool) -> None:
    tokenizer = talk.encoder.tokenizer
    if tokenizer is None or not tokenizer.template_knows("enable_thinking"):
        raise RequestError("the chat template does not know thinking")
    talk.encoder = replace(talk.encoder, thinking=wanted)
    talk.screen.note(f"thinking is {'on' if wanted else 'off'}")


def _set_format(talk: TerminalChat, text: str) -> None:
    if text not in ("json", ""):
        raise RequestError(f"format is {text!r}; allowed: json (--json-schema takes schemas)")
    shape = StructuredOutputs(json_object=True) if text else None
    talk.params = replace(talk.params, structured_outputs=shape)
    talk.screen.note("answers are JSON objects" if text else "answers may have any form")


def _switch(
    attribute: str, wanted: bool, says: str, of_screen: bool = False
) -> Callable[[TerminalChat, str], None]:
    """A setting that turns something about the chat or its screen on or off."""

    def change(talk: TerminalChat, _: str) -> None:
        setattr(talk.screen if of_screen else talk, attribute, wanted)
        talk.screen.note(says)

    return change


def _show(talk: TerminalChat, text: str) -> None:
    match text:
        case "info":
            talk.screen.note(banner(talk.llm))
            talk.screen.note(sampling_line(talk.llm.sampling_defaults, talk.params))
        case "system":
            _show_system(talk)
        case "parameters":
            for name, (field, _, _) in PARAMETERS.items():
                talk.screen.note(f"{name} {_told(getattr(talk.params, field))}")
        case "template":
            tokenizer = talk.encoder.tokenizer
            template = tokenizer.chat_template if tokenizer is not None else None
            talk.screen.note(printable(template or "the model has no chat template"))
        case _:
            talk.screen.note(SHOW_HELP)


def _told(value: Any) -> str:
    """A parameter as :data:`PARAMETERS` reads it."""
    if value is None:
        return "-1"
    return printable(" ".join(value)) if isinstance(value, tuple | list) else str(value)


def _show_system(talk: TerminalChat) -> None:
    talk.screen.note(printable(talk.encoder.system or "there is no system message"))


_COMMANDS: Mapping[str, Callable[[TerminalChat, str], None]] = {
    **dict.fromkeys(("?", "help"), _help),
    "clear": _clear,
    "drop": _drop,
    "set": _set,
    "show": _show,
    "stats": _stats,
    "system": _system,
}
_SETTINGS: Mapping[str, Callable[[TerminalChat, str], None]] = {
    "system": _set_system,
    "nosystem": lambda talk, _: _set_system(talk, ""),
    "parameter": _set_parameter,
    "think": lambda talk, _: _set_thinking(talk, True),
    "nothink": lambda talk, _: _set_thinking(talk, False),
    "format": _set_format,
    "noformat": lambda talk, _: _set_format(talk, ""),
    "verbose": _switch("shows_figures", True, "figures after each answer are on"),
    "quiet": _switch("shows_figures", False, "figures after each answer are off"),
    "wordwrap": _switch("wraps", True, "lines end between words", of_screen=True),
    "nowordwrap": _switch("wraps", False, "lines end at the edge", of_screen=True),
    "history": _switch("keeps_typed", True, "what is typed is kept for later chats"),
    "nohistory": _switch("keeps_typed", False, "what is typed is not kept for later chats"),
    "drop": _switch("drops", True, "the oldest turns go when the context is full"),
    "nodrop": _switch("drops", False, "the oldest turns are kept"),
}


MAX_ENTRIES = 1000
"""Kept when a session begins; meanwhile the file grows."""

log = logging.getLogger(__name__)


class PromptHistory:
    """What was typed, a JSON string a line, in a file that only its owner can read.

    Sessions at the same time add to the same file. When it cannot be written, the log says so once.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or state_folder() / "typed.jsonl"
        self._is_kept = True

    def texts(self) -> list[str]:
        """What was typed, the oldest first; lines that are damaged are passed over."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        if len(lines) > 2 * MAX_ENTRIES:
            self._shorten(lines)
        return [text for line in lines[-MAX_ENTRIES:] if (text := _text(line)) is not None]

    def add(self, text: str) -> None:
        """Keep what was typed."""
        if not self._is_kept:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _append(self._path, json.dumps(text) + "\n")
        except OSError as error:
            self._is_kept = False
            log.warning("what is typed is not kept: %s", error)

    def _shorten(self, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines[-MAX_ENTRIES:])
        try:
            with whole_file(self._path, PacelineError) as partial:
                _append(partial, text)
        except (OSError, PacelineError) as error:
            log.warning("what was typed is not shortened: %s", error)


def _text(line: str) -> str | None:
    try:
        text = json.loads(line)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _append(path: Path, text: str) -> None:
    """Write behind what a file has; it is private before anything is in it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)
