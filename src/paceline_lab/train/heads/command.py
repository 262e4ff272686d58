"""``paceline train head``: its options and its work."""

from __future__ import annotations

from typing import Any

from paceline.core.checks import require_torch
from paceline_lab.train.command import config_values, options_of, report
from paceline_lab.train.configs import TEXTS, HeadTrainingConfig

HeadOptions = options_of(HeadTrainingConfig, without=TEXTS)


def train_head_command(options: Any) -> int:
    """The work of ``paceline train head``."""
    require_torch("this trains a head")
    from paceline_lab.train.heads.train import train_head

    config = HeadTrainingConfig(**config_values(HeadTrainingConfig, vars(options)))
    return report(train_head(config))
