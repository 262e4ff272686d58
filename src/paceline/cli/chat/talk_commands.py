"""What can be typed in a conversation besides messages, by the names that Ollama gives to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from paceline.cli.chat.conversation import Conversation, counted
from paceline.cli.chat.talk_input import Command
from paceline.cli.terminal.display import banner, closing_line, printable, sampling_line
from paceline.core.errors import RequestError
from paceline.request.structured_outputs import StructuredOutputs

HELP = """\
/set                    what can be set, such as /set system TEXT and /set parameter temperature 0
/show                   what can be shown, such as /show parameters
/system TEXT            the same as /set system TEXT; alone it shows what is set
/stats                  speed and acceptance of the last answer and of all
/clear                  forget the conversation
/drop                   forget its oldest turns, then answer the message that did not fit
/bye, /exit, exit       leave
/?, /help               this list

\"\"\" begins and ends a message of several lines. A paste is one message, whatever lines it has."""
SET_HELP = """\
/set system TEXT             a message before the conversation; /set system alone takes it away
/set parameter NAME VALUE    {names}
/set think, nothink          ask the chat template for thoughts, or for none
/set format json             answer with JSON objects; /set noformat with anything
/set verbose, quiet          show figures after each answer, or none
/set wordwrap, nowordwrap    end lines between words, or at the edge
/set history, nohistory      keep what is typed for later chats, or do not
/set drop, nodrop            forget the oldest turns by itself where the context is full"""
SHOW_HELP = """\
/show info          the model, how it is run, and how it is sampled
/show system        the message before the conversation
/show parameters    what /set parameter can change
/show template      the model's chat template"""


def _count(value: str) -> int | None:
    number = int(value)
    return None if number < 0 else number


PARAMETERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "seed": ("seed", int),
    "num_predict": ("max_tokens", _count),
    "stop": ("stop", str.split),
    "repeat_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
}
"""By Ollama's name: ours, and how a value is read."""


def carry_out(talk: Conversation, command: Command) -> bool:
    """Do what a command says; whether the conversation goes on.

    Raises:
        RequestError: it cannot be done.
    """
    if command.name in ("bye", "exit", "quit"):
        return False
    found = _COMMANDS.get(command.name)
    if found is None:
        raise RequestError(
            f"there is no command /{printable(command.name)}; /? lists them (and a message that "
            'begins so is put between """)'
        )
    found(talk, command.argument)
    return True


def _help(talk: Conversation, _: str) -> None:
    talk.screen.note(HELP)


def _clear(talk: Conversation, _: str) -> None:
    talk.messages.clear()
    talk.unanswered = None
    talk.screen.note("the conversation is forgotten")


def _drop(talk: Conversation, _: str) -> None:
    dropped = talk.make_room(talk.unanswered)
    left = len(talk.messages) // 2
    talk.screen.note(f"dropped the oldest {counted(dropped)}; {counted(left)} left")
    if talk.unanswered is not None:
        talk.ask(talk.unanswered)


def _stats(talk: Conversation, _: str) -> None:
    talk.screen.note(f"last answer: {closing_line(talk.last)}")
    talk.screen.note(f"all answers: {closing_line(talk.all)}")


def _system(talk: Conversation, text: str) -> None:
    if text:
        _set_system(talk, text)
    else:
        _show_system(talk)


def _set(talk: Conversation, text: str) -> None:
    name, _, value = text.partition(" ")
    found = _SETTINGS.get(name)
    if found is None:
        names = ", ".join(PARAMETERS)
        talk.screen.note(SET_HELP.format(names=names))
        return
    found(talk, value.strip())


def _set_system(talk: Conversation, text: str) -> None:
    if not talk.encoder.uses_chat:
        raise RequestError("the model has no chat template, so there is no system message")
    talk.encoder = replace(talk.encoder, system=_unquoted(text) or None)
    talk.screen.note("the system message is set" if text else "there is no system message")


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _set_parameter(talk: Conversation, text: str) -> None:
    name, _, value = text.partition(" ")
    if name not in PARAMETERS:
        raise RequestError(f"there is no parameter {name!r}; allowed: {', '.join(PARAMETERS)}")
    field, read = PARAMETERS[name]
    try:
        given = read(_unquoted(value.strip()))
    except ValueError as error:
        raise RequestError(f"{name} is {value.strip()!r}; allowed: a number") from error
    talk.params = replace(talk.params, **{field: given})
    talk.screen.note(f"{name} is {given if given is not None else 'without a limit'}")


def _set_thinking(talk: Conversation, wanted: bool) -> None:
    tokenizer = talk.encoder.tokenizer
    if tokenizer is None or not tokenizer.template_knows("enable_thinking"):
        raise RequestError("the chat template does not know thinking")
    talk.encoder = replace(talk.encoder, thinking=wanted)
    talk.screen.note(f"thinking is {'on' if wanted else 'off'}")


def _set_format(talk: Conversation, text: str) -> None:
    if text not in ("json", ""):
        raise RequestError(f"format is {text!r}; allowed: json (--json-schema takes schemas)")
    shape = StructuredOutputs(json_object=True) if text else None
    talk.params = replace(talk.params, structured_outputs=shape)
    talk.screen.note("answers are JSON objects" if text else "answers may have any form")


def _set_figures(talk: Conversation, wanted: bool) -> None:
    talk.shows_figures = wanted
    talk.screen.note(f"figures after each answer are {'on' if wanted else 'off'}")


def _set_wrapping(talk: Conversation, wanted: bool) -> None:
    talk.screen.wraps = wanted
    talk.screen.note(f"lines end {'between words' if wanted else 'at the edge'}")


def _set_history(talk: Conversation, wanted: bool) -> None:
    talk.keeps_typed = wanted
    talk.screen.note(f"what is typed is {'kept' if wanted else 'not kept'} for later chats")


def _set_dropping(talk: Conversation, wanted: bool) -> None:
    talk.drops = wanted
    kept = "go when the context is full" if wanted else "are kept"
    talk.screen.note(f"the oldest turns {kept}")


def _show(talk: Conversation, text: str) -> None:
    match text:
        case "info":
            talk.screen.note(banner(talk.llm))
            talk.screen.note(sampling_line(talk.llm.sampling_defaults, talk.params))
        case "system":
            _show_system(talk)
        case "parameters":
            for name, (field, _) in PARAMETERS.items():
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


def _show_system(talk: Conversation) -> None:
    talk.screen.note(printable(talk.encoder.system or "there is no system message"))


_COMMANDS: Mapping[str, Callable[[Conversation, str], None]] = {
    **dict.fromkeys(("?", "help"), _help),
    "clear": _clear,
    "drop": _drop,
    "set": _set,
    "show": _show,
    "stats": _stats,
    "system": _system,
}
_SETTINGS: Mapping[str, Callable[[Conversation, str], None]] = {
    "system": _set_system,
    "parameter": _set_parameter,
    "think": lambda talk, _: _set_thinking(talk, True),
    "nothink": lambda talk, _: _set_thinking(talk, False),
    "format": _set_format,
    "noformat": lambda talk, _: _set_format(talk, ""),
    "verbose": lambda talk, _: _set_figures(talk, True),
    "quiet": lambda talk, _: _set_figures(talk, False),
    "wordwrap": lambda talk, _: _set_wrapping(talk, True),
    "nowordwrap": lambda talk, _: _set_wrapping(talk, False),
    "history": lambda talk, _: _set_history(talk, True),
    "nohistory": lambda talk, _: _set_history(talk, False),
    "drop": lambda talk, _: _set_dropping(talk, True),
    "nodrop": lambda talk, _: _set_dropping(talk, False),
}
