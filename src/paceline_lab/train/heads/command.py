"""``paceline train head``: its options and its work."""

from __future__ import annotations

import os
from typing import Any

from paceline.core.checks import require_torch
from paceline_lab.train.command import config_values, options_of, report
from paceline_lab.train.configs import TEXTS, HeadTrainingConfig

HeadOptions = options_of(HeadTrainingConfig, without=TEXTS)


NICENESS = 10
"""How far a head that is trained further stands back behind whoever answers requests."""


def train_head_command(options: Any) -> int:
    """The work of ``paceline train head``."""
    require_torch("this trains a head")
    from paceline_lab.train.heads.train import train_head

    config = HeadTrainingConfig(**config_values(HeadTrainingConfig, vars(options)))
    if config.continue_from is not None:
        return _continue_head(config)
    return report(train_head(config))


def _continue_head(config: HeadTrainingConfig) -> int:
    from paceline_lab.train.heads.continuation import continue_head

    if hasattr(os, "nice"):
        os.nice(NICENESS)
    done = continue_head(config)
    report(done.result)
    if done.previous is not None:
        print(f"adopted: {done.head} is the new head, {done.previous} the old one")
    else:
        print(f"not adopted: no gain is proven; {done.head} is as it was")
    return 0
