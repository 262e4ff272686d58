"""``paceline train``: options as its configurations have them, and the result in a line or two.

The options, their defaults and their help texts are those of the training's configuration, whose
shape stands as its sizes. Knows no model.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, make_dataclass
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

from paceline.cli.model_argument import model_list
from paceline.cli.options import argument, option
from paceline.core.checks import require_torch
from paceline.core.errors import ConfigError
from paceline_lab.train.configs import (
    TEXTS,
    DraftTrainingConfig,
    HeadTrainingConfig,
    LMTrainingConfig,
    ModelShape,
    TrainingConfig,
)

if TYPE_CHECKING:
    from paceline_lab.train.card import TrainingResult

NOT_OPTIONS = ("command",)
"""The command line knows these better than its user."""
SHORT = {"output": ("-o",)}
TARGET = "target"


class Column(NamedTuple):
    """An option."""

    name: str
    type: Any
    default: Any
    help: str


def options_of(
    config: type[Any], without: Collection[str] = (), more: Sequence[tuple[str, Any, Any]] = ()
) -> type[Any]:
    """The dataclass of the options: required ones first, then the training's own, then shared.

    Args:
        without: fields that are no options.
        more: name, type and :func:`~paceline.cli.options.option` of further ones.
    """
    common = fields(TrainingConfig) if issubclass(config, TrainingConfig) else ()
    shared = {field.name for field in common}
    columns = [column for column in _columns(config) if column.name not in without]
    columns.sort(key=lambda column: (column.default is not MISSING, column.name in shared))
    made = [field for column in columns for field in _fields(column)]
    made += more
    return make_dataclass("Options", made, frozen=True, kw_only=True, eq=False, repr=False)


def _columns(config: type[Any], defaults: object = None) -> Iterator[Column]:
    """The fields of a configuration; of its shape, with the defaults of the one that is given."""
    hints = get_type_hints(config)
    for field in fields(config):
        if field.name in NOT_OPTIONS:
            continue
        if field.name == "shape":
            assert field.default_factory is not MISSING
            yield from _columns(ModelShape, field.default_factory())
            continue
        default = field.default if defaults is None else getattr(defaults, field.name)
        yield Column(field.name, hints[field.name], default, _help(config, field))


def _help(config: type[Any], field: Field[Any]) -> str:
    """What the docstring of the class that has this field says of it."""
    for owner in config.__mro__:
        section = cleandoc(owner.__doc__ or "").partition("Attributes:")[2]
        for entry in re.split(r"\n {4}(?=\w)", section):
            names, _, text = entry.strip().partition(": ")
            if field.name in names.split(", "):
                return " ".join(text.replace("``", "").split())
    raise AssertionError(f"{config.__name__} does not describe {field.name}")


def _fields(column: Column) -> Iterator[tuple[str, Any, Any]]:
    """The option; the model that is drafted for is the argument MODEL as well."""
    if column.name == TARGET:
        yield "model", str | None, argument(None, _sentence(column.help))
        yield TARGET, str | None, option(None, "The same as MODEL.")
    else:
        yield column.name, _hint(column.type), _option(column)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _hint(kind: Any) -> Any:
    return list[get_args(kind)[0]] if get_origin(kind) is tuple else kind  # type: ignore[misc]


def _option(column: Column) -> Any:
    text, more = _sentence(column.help), dict[str, Any]()
    if get_origin(column.type) is tuple:
        is_long = ". " in text
        text = text.rstrip(".") + (". Can" if is_long else "; can") + " be given several times."
        more["metavar"] = f"<{get_args(column.type)[0].__name__}>"
    default = ... if column.default is MISSING else column.default
    both = column.type is bool
    return option(default, text, *SHORT.get(column.name, ()), both=both, **more)


LMOptions = options_of(LMTrainingConfig)
DraftOptions = options_of(DraftTrainingConfig)
HeadOptions = options_of(HeadTrainingConfig, without=TEXTS)


def train_lm_command(options: Any) -> int:
    """The work of ``paceline train lm``."""
    require_torch("this trains a model")
    from paceline_lab.train.lm import train_lm

    return _report(train_lm(LMTrainingConfig(**config_values(LMTrainingConfig, vars(options)))))


def train_draft_command(options: Any) -> int:
    """The work of ``paceline train draft``."""
    require_torch("this trains a draft")
    from paceline_lab.train.draft import train_draft

    config = DraftTrainingConfig(**config_values(DraftTrainingConfig, vars(options)))
    return _report(train_draft(config))


def train_head_command(options: Any) -> int:
    """The work of ``paceline train head``."""
    require_torch("this trains a head")
    from paceline_lab.train.heads.train import train_head

    config = HeadTrainingConfig(**config_values(HeadTrainingConfig, vars(options)))
    return _report(train_head(config))


def _report(result: TrainingResult) -> int:
    print(f"{result.folder}: {result.num_params / 1e6:.2f} M parameters")
    print(f"{result.steps} steps, {result.train_tokens} tokens, {result.seconds:.0f} s")
    for name, figure in result.figures:
        print(f"{name}: {figure}")
    return 0


def config_values(config: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a configuration, with the sizes of a new model in its shape.

    Raises:
        ConfigError: no target is named, and the training needs one.
    """
    known = {field.name: field for field in fields(config)}
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in given.items()
    }
    if TARGET in values:
        values[TARGET] = values.pop("model") or values[TARGET]
        if values[TARGET] is None and known[TARGET].default is MISSING:
            raise ConfigError(
                f"name the model to draft for, as MODEL or with --target:\n{model_list()}"
            )
    if "command" in known:
        values["command"] = command_line()
    if "shape" in known:
        values["shape"] = ModelShape(**{f.name: values.pop(f.name) for f in fields(ModelShape)})
    return values


def command_line() -> str:
    """What was typed, for the model card."""
    return shlex.join(["paceline", *sys.argv[1:]])
