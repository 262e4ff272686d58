"""A machine on which all work takes as long whenever it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.cache.model_runner import ModelRunner

READING = 0.002
"""Milliseconds that pass between two looks at the clock."""
FORWARD, ROW = 4.0, 0.1
"""Milliseconds of a forward, and of each of its rows."""


class Clock:
    """Stands in for ``time.perf_counter``."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.passed(READING)
        return self.now

    def passed(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3


def run_exactly(
    monkeypatch: pytest.MonkeyPatch,
    outside: Callable[[int, int], float] = lambda requests, nodes: 0.0,
    fetch: float = 0.0,
) -> None:
    """Let every model of this process run on such a machine.

    Args:
        outside: milliseconds that follow a forward of so many requests and draft nodes.
        fetch: milliseconds of a forward for each expert that comes from disk.
    """
    clock, forward = Clock(), ModelRunner.forward

    def timed(
        self: ModelRunner, batch: Any, greedy: bool = False, inputs: torch.Tensor | None = None
    ) -> Any:
        result = forward(self, batch, greedy, inputs)
        inside = FORWARD + ROW * batch.num_rows + fetch * result.experts_fetched
        self.seconds += inside / 1e3
        requests = len(result.offsets) - 1
        clock.passed(inside + outside(requests, batch.num_rows - requests))
        return result

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(ModelRunner, "forward", timed)
    monkeypatch.setattr(ModelRunner, "grows_trees", False)  # in a call that hides its forwards
