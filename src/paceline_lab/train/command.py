"""``paceline train``: options as its configurations have them, and the result in a line or two.

The options, their defaults and their help texts are those of the training's configuration, whose
shape stands as its sizes. Knows no model.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from paceline.cli.model_argument import model_list
from paceline.cli.options import SEVERAL, argument, from_config, option
from paceline.core.checks import require_torch
from paceline.core.errors import ConfigError
from paceline_lab.train.configs import (
    DraftTrainingConfig,
    LMTrainingConfig,
    ModelShape,
    TrainingConfig,
)

if TYPE_CHECKING:
    from paceline_lab.train.card import TrainingResult

NOT_OPTIONS = ("command",)
"""The command line knows these better than its user."""
SHORT = {"output": {"short": "-o"}, "continue_from": {"short": "--continue"}}
TARGET = "target"


def options_of(
    config: type[Any], without: Collection[str] = (), more: Sequence[tuple[str, Any, Any]] = ()
) -> type[Any]:
    """The dataclass of the options: required ones first, then the training's own, then shared.

    Args:
        without: fields that are no options.
        more: name, type and :func:`~paceline.cli.options.option` of further ones.
    """
    common = fields(TrainingConfig) if issubclass(config, TrainingConfig) else ()
    shared = {each.name for each in common}
    hints = get_type_hints(config)
    own = [each for each in fields(config) if each.name not in (*NOT_OPTIONS, *without)]
    own.sort(key=lambda each: (not _is_required(each), each.name in shared))
    made = [one for each in own for one in _declared(config, each, hints[each.name])]
    made += more
    return make_dataclass("Options", made, frozen=True, kw_only=True, eq=False, repr=False)


def _is_required(setting: Field[Any]) -> bool:
    return setting.default is MISSING and setting.default_factory is MISSING


def _declared(config: type[Any], setting: Field[Any], hint: Any) -> Iterator[tuple[str, Any, Any]]:
    """The option; the model that is drafted for is the argument MODEL too, a shape its sizes."""
    name = setting.name
    if name == "shape":
        assert setting.default_factory is not MISSING
        shape, hints = setting.default_factory(), get_type_hints(ModelShape)
        for size in fields(ModelShape):
            default, is_switch = getattr(shape, size.name), hints[size.name] is bool
            option_of_size = from_config(ModelShape, size.name, default=default, both=is_switch)
            yield size.name, hints[size.name], option_of_size
    elif name == TARGET:
        yield "model", str | None, argument(None, setting.metadata["help"])
        yield TARGET, str | None, option(None, "The same as MODEL.")
    elif get_origin(hint) is tuple:
        part = get_args(hint)[0]
        several = from_config(config, name, SEVERAL, metavar=f"<{part.__name__}>")
        yield name, list[part], several  # type: ignore[valid-type]
    else:
        yield name, hint, from_config(config, name, both=hint is bool, **SHORT.get(name, {}))


LMOptions = options_of(LMTrainingConfig)
DraftOptions = options_of(DraftTrainingConfig)


def train_lm_command(options: Any) -> int:
    """The work of ``paceline train lm``."""
    require_torch("this trains a model")
    from paceline_lab.train.lm import train_lm

    return report(train_lm(LMTrainingConfig(**config_values(LMTrainingConfig, vars(options)))))


def train_draft_command(options: Any) -> int:
    """The work of ``paceline train draft``."""
    require_torch("this trains a draft")
    from paceline_lab.train.draft import train_draft

    config = DraftTrainingConfig(**config_values(DraftTrainingConfig, vars(options)))
    return report(train_draft(config))


def report(result: TrainingResult) -> int:
    """Say what a finished training reports; returns the exit code."""
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
        values["command"] = shlex.join(["paceline", *sys.argv[1:]])
    if "shape" in known:
        values["shape"] = ModelShape(**{f.name: values.pop(f.name) for f in fields(ModelShape)})
    return values
