"""Commands that cost their names and help texts until they are used.

``paceline --help`` needs no more than that. A command's options are imported when it is looked at,
its work when it runs. Knows no command: :mod:`paceline.commands.table` lists them.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.commands.table import COMMANDS, Entry

ENVIRONMENT_NOTE = "Every option also reads PACELINE_<NAME>: --max-tokens is PACELINE_MAX_TOKENS."


class LazyGroup(TyperGroup):
    """A group with the commands that the table lists under its name, before its own groups."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        listed = {entry.name: LazyCommand(entry) for entry in COMMANDS[self.name or ""]}
        self.commands = {**listed, **self.commands}


class LazyCommand(TyperCommand):
    """A command that is made of its options when something first asks for its parameters."""

    def __init__(self, entry: Entry) -> None:
        text = inspect.cleandoc(entry.help)
        super().__init__(entry.name, help=text, epilog=ENVIRONMENT_NOTE, rich_markup_mode=None)
        self._entry = entry
        del self.params, self.callback  # So that asking for them comes to __getattr__.

    def __getattr__(self, name: str) -> Any:
        if name not in ("params", "callback"):
            raise AttributeError(f"a command has no attribute {name!r}")
        from paceline.commands.signature import takes

        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command()(takes(load(self._entry.options))(self._work))
        made = typer.main.get_command(single)
        self.params, self.callback = made.params, made.callback
        return getattr(self, name)

    def _work(self, options: Any) -> None:
        raise typer.Exit(load(self._entry.work)(options))


def load(reference: str) -> Any:
    """What ``module:name`` of :mod:`paceline.commands` refers to."""
    module, _, name = reference.partition(":")
    return getattr(import_module(f"paceline.commands.{module}"), name)
