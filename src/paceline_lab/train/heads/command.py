"""``paceline train head``: its options, and the result in a line or two."""

from __future__ import annotations

from typing import Any

from paceline.core.checks import require_torch
from paceline_lab.train.command import config_values, options_of
from paceline_lab.train.configs import TEXTS, HeadTrainingConfig

HeadOptions = options_of(HeadTrainingConfig, without=TEXTS)


def train_head_command(options: Any) -> int:
    """The work of ``paceline train head``."""
    require_torch("this trains a head")
    from paceline_lab.train.heads.train import train_head

    result = train_head(HeadTrainingConfig(**config_values(HeadTrainingConfig, vars(options))))
    print(f"{result.folder}: {result.num_params / 1e6:.2f} M parameters")
    print(f"{result.steps} steps, {result.train_tokens} tokens, {result.seconds:.0f} s")
    for when, acceptance in (("before", result.before), ("after", result.after)):
        if acceptance is not None:
            print(f"held-out acceptance {when}: {acceptance}")
    return 0
