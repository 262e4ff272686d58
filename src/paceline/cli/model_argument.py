"""The argument MODEL: first, and asked of a person at a terminal where a command names none.

Imports nothing slow.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import typer

from paceline.build.default_drafts import is_embedded
from paceline.cli.terminal import printable
from paceline.core.errors import ConfigError
from paceline.loading.catalogue import EMBEDDED, all_models

SMALL = "smollm2"
"""The model to begin with."""


def with_model(options: Any, command: str) -> Any:
    """A command's :class:`~paceline.cli.options.ModelOptions` with a model, where it needs one.

    Args:
        command: as it was typed, with the program's name.

    Raises:
        ConfigError: the command needs a model, and there is none or there are two.
    """
    if options.embedded:
        if options.model and not is_embedded(options.model):
            raise ConfigError(
                f"MODEL is {options.model!r}, and --embedded names another one: leave out one of "
                f"them, or write {command} {EMBEDDED} and then the prompt"
            )
        return replace(options, model=EMBEDDED)
    if options.model or not options.needs_model:
        return options
    return replace(options, model=needed_model(None, command))


def needed_model(model: str | None, command: str) -> str:
    """The model, if need be as a person at the terminal answers; otherwise ``ConfigError``."""
    if model is not None:
        return model
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{command} needs a model. {advice_on_models(command)}")
    typer.echo(printable(model_list()), err=True)
    answer: str = typer.prompt("Which model", default=SMALL, err=True)
    return answer


def advice_on_models(command: str) -> str:
    """What to type instead of a command without its model."""
    return f"Try: {command} {SMALL}\n{model_list()}"


def model_list() -> str:
    """The models that have a name, one a line, and what else a model may be."""
    entries = all_models()
    width = max(len(entry.name) for entry in entries) + 2
    lines = [f"  {entry.name.ljust(width)}{entry}" for entry in entries]
    return "\n".join([*lines, "  or a folder, a GGUF file, or a hub id such as org/name"])


def model_and_file(
    first: str | None, second: str | None, option: str | None
) -> tuple[str | None, str | None]:
    """The model and the file out of ``[MODEL] FILE``; None for what is not named.

    Args:
        first, second: the arguments; a single one is the file.
        option: the model as ``--model`` says it, which the argument precedes.
    """
    model, file = (first, second) if second is not None else (None, first)
    return model if model is not None else option, file


def lasting_name(model: str) -> str:
    """A model's name or hub id as it is, the embedded one's, or its path from the root."""
    if is_embedded(model):
        return EMBEDDED
    path = os.path.expanduser(model)
    return os.path.abspath(path) if os.path.exists(path) else model
