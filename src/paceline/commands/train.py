"""``paceline train``: from options to a training configuration, and the result in a line or two."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

from paceline.commands.train_options import SHAPE_NAMES
from paceline.training.draft import train_draft
from paceline.training.draft_options import DraftTrainingConfig
from paceline.training.lm import LMTrainingConfig, train_lm
from paceline.training.model_files import ModelShape


def train_lm_command(options: Any) -> int:
    """Run ``paceline train lm``; returns the exit code.

    Raises:
        ConfigError, TrainingError: the options or the data cannot be used.
    """
    result = train_lm(LMTrainingConfig(**_config_values(vars(options))))
    print(f"{result.folder}: {result.num_params / 1e6:.2f} M parameters")
    print(
        f"{result.steps} steps, {result.train_tokens} tokens, {result.seconds:.0f} s; held-out "
        f"loss {result.held_out_before:.3f} -> {result.held_out_after:.3f} nats per token"
    )
    return 0


def train_draft_command(options: Any) -> int:
    """Run ``paceline train draft``; returns the exit code.

    Raises:
        ConfigError, TrainingError: the options or the data cannot be used.
    """
    result = train_draft(DraftTrainingConfig(**_config_values(vars(options))))
    print(f"{result.folder}: {result.num_params / 1e6:.2f} M parameters")
    print(f"{result.steps} steps, {result.train_tokens} tokens, {result.seconds:.0f} s")
    for when, acceptance in (("before", result.before), ("after", result.after)):
        if acceptance is not None:
            print(f"held-out acceptance {when}: {acceptance}")
    if result.chains is not None:
        print(f"held-out greedy drafts: {result.chains}")
    return 0


def _config_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a training configuration: the sizes of a new model in its shape."""
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in given.items()
    }
    sizes = {name: values[name] for name in SHAPE_NAMES}
    rest = {name: value for name, value in values.items() if name not in sizes}
    return {**rest, "shape": ModelShape(**sizes), "command": command_line()}


def command_line() -> str:
    """What was typed, for the model card."""
    return shlex.join(["paceline", *sys.argv[1:]])
