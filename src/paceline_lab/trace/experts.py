"""How many experts of a mixture the steps along a trace read: recorded once, looked up in replays.

A step reads each expert of a layer once for all rows that choose it. Which experts a row of an
answer chose is a function of the text before it, so one pass over the text tells what every step
along it would have read, were its rows the tokens that came. The rows of rejected nodes are taken
to be as alike as those. Knows no files and no prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.engine.engine import Engine
from paceline.planner.corrections import alike_of, union
from paceline.planner.cost_table import ExpertCost
from paceline.request.traces import UNION_ROWS, Trace
from paceline_lab.teacher_forcing import SEQUENCE, SLICE_ROWS, forced_slice

Places = Iterable[tuple[int, int, int]]
"""Of each request in a step its trace, the place in its answer, and its rows."""


def with_experts(engine: Engine, traces: Sequence[Trace]) -> list[Trace]:
    """The traces with what steps along them read.

    Call it where the engine is stepped and between two steps; its target is a mixture.

    Raises:
        ConfigError: the KV cache has no room for a text.
    """
    experts, recorded = engine.runner.decoder.config.mlp.experts, []
    assert experts is not None
    for trace in traces:
        sizes = union_sizes(_chosen(engine, trace.token_ids.tolist()), experts.number)
        recorded.append(replace(trace, experts_read=sizes[trace.prompt_len - 1 : -1]))
    return recorded


def _chosen(engine: Engine, token_ids: Sequence[int]) -> NDArray[Any]:
    """The experts of each token, ``[layers, tokens, per_token]``."""
    slices = []
    engine.kv.open(SEQUENCE)
    try:
        for start in range(0, len(token_ids), SLICE_ROWS):
            forced_slice(engine, token_ids, start, min(start + SLICE_ROWS, len(token_ids)), ())
            slices.append(np.stack(engine.runner.chosen_experts))
    finally:
        engine.kv.free(SEQUENCE)
    return np.concatenate(slices, axis=1)


def union_sizes(chosen: NDArray[Any], number: int) -> NDArray[Any]:
    """Distinct pairs of a layer and an expert in every run of :data:`UNION_ROWS` tokens.

    Runs that would go beyond the text are its last ones.

    Args:
        chosen: ``[layers, tokens, per_token]``.
        number: of experts of a layer.

    Returns:
        int32 ``[tokens, len(UNION_ROWS)]``.
    """
    layers, count, _ = chosen.shape
    is_read = np.zeros((count, layers, number), bool)
    np.put_along_axis(is_read, chosen.transpose(1, 0, 2), True, axis=2)
    places, columns, rows = np.arange(count), [], 1
    for wanted in UNION_ROWS:  # each twice the one before
        is_read |= is_read[np.minimum(places + rows, max(0, count - rows))]
        rows = wanted
        sizes = is_read.sum(axis=(1, 2), dtype=np.int32)
        columns.append(sizes[np.minimum(places, max(0, count - rows))])
    return np.stack(columns, axis=1)


class ExpertUnions:
    """What steps of replayed traces read."""

    def __init__(self, traces: Sequence[Trace], cost: ExpertCost) -> None:
        self._sizes: list[list[list[int]]] = []
        for trace in traces:
            assert trace.experts_read is not None
            self._sizes.append(trace.experts_read.tolist())
        self._cost, self._rows = cost, (1, *UNION_ROWS)
        self._whole = cost.layers * cost.number

    def read(self, places: Places) -> int:
        """Experts of all layers together; several requests choose by themselves."""
        unread = 1.0
        for trace, place, rows in places:
            unread *= 1.0 - self._read(self._sizes[trace][place], rows) / self._whole
        return round(self._whole * (1.0 - unread))

    def growth(self, places: Sequence[tuple[int, int]], count: int) -> list[int]:
        """The same with 0 to ``count`` draft nodes, dealt out evenly."""
        parts = len(places)
        return [
            self.read((*at, 1 + n // parts + (i < n % parts)) for i, at in enumerate(places))
            for n in range(count + 1)
        ]

    def _read(self, sizes: Sequence[int], rows: int) -> float:
        """By one request: as recorded, on a line between two numbers of rows, and beyond the
        last one as the rows of that one would go on."""
        cost, last = self._cost, self._rows[-1]
        if rows > last:
            alike = alike_of(last, sizes[-1] / cost.layers, cost.per_token, cost.number)
            return cost.layers * union(rows, alike, cost.per_token)
        return float(np.interp(rows, self._rows, (cost.least, *sizes)))
