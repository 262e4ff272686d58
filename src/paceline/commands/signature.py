"""From a dataclass of options to a function with the signature that Typer reads.

Knows no option and no command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

import typer

from paceline.commands.config_file import without_overruled

Options = TypeVar("Options")


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Give a command one parameter per field of a dataclass, and hand it the filled dataclass.

    The fields are annotated with :func:`paceline.commands.options.option` or ``argument``.
    """
    hints = get_type_hints(options, include_extras=True)
    own = [_parameter(field, hints[field.name]) for field in fields(options)]  # type: ignore[arg-type]
    context = inspect.Parameter("context", _KIND, annotation=typer.Context)

    def with_parameters(body: Callable[[Options], None]) -> Callable[..., None]:
        def command(context: typer.Context, **values: Any) -> None:
            body(options(**without_overruled(context, values)))

        command.__signature__ = inspect.Signature([context, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in (context, *own)}
        return command

    return with_parameters


_KIND = inspect.Parameter.KEYWORD_ONLY


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    """A field as a parameter; without a default it is required."""
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, _KIND, default=default, annotation=annotation)
