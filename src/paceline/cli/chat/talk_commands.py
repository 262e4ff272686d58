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
PARAMETER_HELP = """\
/set parameter temperature VALUE         0 always takes the likeliest token
/set parameter top_k VALUE               sample from this many of the likeliest tokens
/set parameter top_p VALUE               sample from the likeliest tokens up to this probability
/set parameter min_p VALUE               sample from tokens at least this likely
/set parameter seed VALUE                repeat an answer; -1 draws a seed
/set parameter num_predict VALUE         maximum tokens per answer; -1 is no limit
/set parameter stop VALUE VALUE ...      end the answer before one of these texts
/set parameter repeat_penalty VALUE      divisor for tokens that have occurred; 1 is none
/set parameter presence_penalty VALUE    subtracted from tokens of the answer; 0 is none
/set parameter frequency_penalty VALUE   the same for each time that they occurred"""
SHOW_HELP = """\
/show info          the model, how it runs, and how answers are sampled
/show system        the system message
/show parameters    the values that /set parameter changes
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


def carry_out(talk: Conversation, command: Command) -> bool:
    """Do what a command says; whether the conversation goes on.

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
    change = _SETTINGS.get(name)
    if change is None:
        talk.screen.note(SET_HELP)
    else:
        change(talk, value.strip())


def _set_system(talk: Conversation, text: str) -> None:
    if not talk.encoder.uses_chat:
        raise RequestError("the model has no chat template, so there is no system message")
    talk.encoder = replace(talk.encoder, system=_unquoted(text) or None)
    talk.screen.note("the system message is set" if text else "there is no system message")


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _set_parameter(talk: Conversation, text: str) -> None:
    name, _, value = text.partition(" ")
    if not value.strip() and (not name or name in PARAMETERS):
        talk.screen.note(PARAMETER_HELP)
        return
    if name not in PARAMETERS:
        unknown = f"there is no parameter {name!r}; allowed: {', '.join(PARAMETERS)}"
        raise RequestError(NOT_HERE.get(name, unknown))
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
    "nosystem": lambda talk, _: _set_system(talk, ""),
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
