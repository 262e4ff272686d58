"""Traces of the toy target, and what its steps are said to cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.planner.cost import CostModel
from paceline.planner.cost_table import NO_HOST_TIME, CostPoint, CostTable, HostTime
from paceline.request.traces import Trace
from tests.toy import TOY

SEED = 11


def make_trace(index: int, prompt: Sequence[int], output: Sequence[int]) -> Trace:
    rows = np.zeros((len(output), 1), np.float32)
    tokens = np.array([*prompt, *output], np.int32)
    return Trace(index, len(prompt), tokens, rows[:, 0], rows.astype(np.int32), rows)


def make_meta(max_tokens: int, temperature: float = 0.0) -> dict[str, Any]:
    said = {"max_tokens": max_tokens, "temperature": temperature, "seed": SEED}
    return {"params": {**said, "max_model_len": TOY.max_position}}


def frozen_cost(
    curve: Sequence[float] = (1.0, 1.05, 1.08, 1.1, 1.9, 2.0), host: HostTime = NO_HOST_TIME
) -> CostModel:
    """Milliseconds of widths 1, 2, ..., and 0.1 for each further one; all else costs too."""
    times = dict(enumerate(curve, start=1))
    times[64] = curve[-1] + (64 - len(curve)) * 0.1
    points = [
        CostPoint(requests, context, width, samples, ms * (1 + context / 400) * requests**0.5)
        for width, ms in times.items()
        for requests in (1, 4)
        for context in (0, 128)
        for samples in sorted({0, 1, width})
        if requests == 1 or samples == width
    ]
    return CostModel(CostTable("toy", points, host=host), learns=False)
