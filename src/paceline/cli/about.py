"""``paceline version`` and ``paceline help``, for those who do not think of ``--version``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer

from paceline import __version__
from paceline.cli.options.options import argument
from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VersionOptions:
    """Options of ``paceline version``: none."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HelpOptions:
    """Options of ``paceline help``."""

    command: list[str] | None = argument(None, "The command, such as run or bench serve.")


def version_command(options: VersionOptions) -> int:
    """The work of ``paceline version``."""
    typer.echo(f"paceline {__version__}")
    return 0


def help_command(options: HelpOptions) -> int:
    """The work of ``paceline help``."""
    from paceline.cli.main import app  # which imports the table that names this module

    command: Any = typer.main.get_command(app)
    context = command.make_context("paceline", [], resilient_parsing=True)
    for word in options.command or ():
        below = getattr(command, "commands", {})
        found = command.get_command(context, word) if below else None
        if found is None:
            raise ConfigError(
                f"{context.command_path} has no command {word!r}; there are "
                f"{', '.join(below) or 'none'}"
            )
        command = found
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    typer.echo(command.get_help(context))
    return 0
