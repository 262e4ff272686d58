"""What a step costs on this machine at this moment: the prediction, and what it assumes at first.

    T(step) = table(step) x correction(rows)

The table is what was measured, read as it is and never smoothed; without a profile it is the prior.
What it has wrong now, :mod:`paceline.planner.corrections` learns; of a mixture that includes the
experts that a step reads beyond those of the table's step. Knows neither clock nor model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from math import inf, log
from operator import add, mul
from statistics import geometric_mean
from typing import Any

from paceline.planner.corrections import ASSUMED, DISK, MEASURED, NOISE, CostFilter, ExpertPrices
from paceline.planner.cost_table import (
    MAX_MS,
    NO_STEP,
    PLAIN_STEP,
    CostPoint,
    CostTable,
    ExpertCost,
    StepShape,
)

CurveKey = tuple[int, int, int, int, int]
GRAIN = 64
"""Contexts are rounded to multiples of this, so that curves can be kept, which are read from the
table in pieces of so many nodes."""
HOPE = 0.125
"""What width may be hoped to cost where nothing was seen of it, as a part of what is believed."""
MAX_CURVES = 4096
"""Curves, and times of single steps, that are kept."""


class CostModel:
    """Predicts the time of a step in milliseconds.

    Before the first observation a table of relative times predicts multiples of the plain step,
    and goes on to do so where nothing is learnt.

    Args:
        table: of this machine and model; None where there is no profile.
        learns: False freezes the predictions: :meth:`observe` does nothing.
        ops, experts: name of the model's operations, and its mixtures; what is assumed without a
            profile depends on them.
        from_disk: share of the experts that a step reads which is expected to come from disk.
        streamed: share of the weights that every step reads from disk, of a dense model.
    """

    def __init__(
        self,
        table: CostTable | None = None,
        *,
        learns: bool = True,
        ops: str = "",
        experts: ExpertCost | None = None,
        from_disk: float = 0.0,
        streamed: float = 0.0,
    ) -> None:
        self.has_profile = table is not None
        """False where the table is only the prior."""
        self.table = prior_table(ops, experts, streamed) if table is None else table
        self.learns = learns
        spread = MEASURED if self.has_profile else ASSUMED
        self._filter = CostFilter(spread, self.table.is_relative)
        self._experts: ExpertPrices | None = None
        if self.table.experts is not None:
            self._experts = ExpertPrices(
                self.table.experts,
                (NOISE / spread) ** 2,
                is_measured=self.has_profile,
                plain_ms=self.table.step(PLAIN_STEP),
                from_disk=from_disk,
            )
            self._read = CostModel(self.table.experts_read(), learns=False)
        self._curves: dict[CurveKey, list[float]] = {}
        self._times: dict[CurveKey, float] = {}
        self._latest = NO_STEP, self.table.step(NO_STEP)

    def predict(self, shape: StepShape) -> float:
        """Milliseconds of a step; contexts count as rounded to :data:`GRAIN`."""
        time = self._time(shape)
        return time * self._filter.factor(shape.rows) if self.learns else time

    def growth(
        self, shape: StepShape, count: int, experts: Sequence[float] | None = None
    ) -> list[float]:
        """Milliseconds of the step with 0 to ``count`` further draft nodes, ``[count + 1]``.

        Each node is a sampled row whose context is the mean context of the step's requests.

        Args:
            experts: that each of these steps reads; None is what is expected.
        """
        times = self._curve(shape, count)[: count + 1]
        if self._experts is not None:
            price, read = self._experts.ms, self._read.growth(shape, count)
            if experts is None:
                experts = self._experts.union.read(self._unions(shape, read), _requests(shape))
            further = [price * (n - of_table) for n, of_table in zip(experts, read, strict=True)]
            times = [*map(add, times, further)]
        return [*map(mul, times, self._filter.factors(shape.rows, count))] if self.learns else times

    def hoped(self, shape: StepShape, growth: Sequence[float]) -> list[float]:
        """The step's :meth:`growth` were width as cheap as what is not known of it allows."""
        plain, doubts = growth[0], self._filter.doubts(shape.rows, len(growth) - 1)
        return [
            plain + (ms - plain) * HOPE**doubt for ms, doubt in zip(growth, doubts, strict=True)
        ]

    def deviation(self, shape: StepShape) -> float:
        """How uncertain the machine's state leaves the time of a step, as a logarithm."""
        return self._filter.deviation(shape.rows) if self.learns else 0.0

    def rows_within(self, shape: StepShape, milliseconds: float, limit: int) -> int:
        """Further prefill rows, up to ``limit``, with which the step stays within the time.

        The most of them where time rises with rows, which it is taken to do here: behind a cliff
        there may be more. Rows are not sampled, and see the mean context of the step's requests.
        """
        if self.learns and not self._filter.knows_unit:
            return limit
        context = shape.context_sum / _requests(shape)

        def time(count: int) -> float:
            rows, seen = shape.rows + count, shape.rows_x_context + count * context
            whole = StepShape(rows, seen, shape.context_sum, shape.samples, shape.requests)
            return self.predict(whole)

        return max(0, bisect_right(range(limit + 1), milliseconds, key=time) - 1)

    def observe(self, shape: StepShape, milliseconds: float) -> None:
        """Learn from one step. What is no step's time is ignored: NaN, infinite, 0, negative."""
        if not self.learns or not 0.0 < milliseconds <= MAX_MS:
            return
        time, experts = self._time(shape), self._experts
        if experts is not None:
            experts.count(shape.experts, shape.fetched)
        if time > 0.0:
            error = self._filter.observe(shape.rows, log(milliseconds / time))
            if experts is not None and shape.experts and shape.rows > 1:
                (step,) = self._unions(shape, [self._read.predict(shape)])
                expected = experts.union.learn(*step, shape.experts, _requests(shape))
                further = experts.beyond(shape.experts, shape.fetched, expected)
                experts.learn(further, time, *error)

    def _time(self, shape: StepShape) -> float:
        """The table's time of a step, with what its own experts take; of one step it is asked
        several times in turn. A single row reads as many experts whatever the text."""
        if shape is self._latest[0]:
            time = self._latest[1]
        else:
            time = self._table_time(shape)
            self._latest = shape, time
        experts = self._experts
        if experts is None or shape.rows <= 1:
            return time
        of_table, read = self._read.predict(shape), float(shape.experts)
        if not shape.experts:
            (read,) = experts.union.read(self._unions(shape, [of_table]), _requests(shape))
        return max(0.0, time + experts.ms * (read - of_table))

    def _unions(self, shape: StepShape, read: Sequence[float]) -> list[tuple[int, float]]:
        """Rows of a step, of one with a further row and so on, with what the table's steps read.

        Args:
            read: by the table's steps. Without a profile these are no measurement, and infinity
                stands for them.
        """
        rows = max(1, shape.rows)
        if not self.has_profile:
            return [(rows + further, inf) for further in range(len(read))]
        return [(rows + further, of_table) for further, of_table in enumerate(read)]

    def _table_time(self, shape: StepShape) -> float:
        key = _key(shape)
        time = self._times.get(key)
        if time is None:
            _make_room(self._times)
            time = self._times[key] = self.table.step(_rounded(key))
        return time

    def _curve(self, shape: StepShape, count: int) -> list[float]:
        """The table's times of a step with 0 to at least ``count`` further nodes."""
        key = _key(shape)
        curve = self._curves.get(key)
        if curve is None or len(curve) <= count:
            _make_room(self._curves)
            curve = self.table.growth(_rounded(key), count + -count % GRAIN).tolist()
            self._curves[key] = curve
        return curve


def _key(shape: StepShape) -> CurveKey:
    rows, rows_x_context, context_sum, samples, requests, *_ = shape
    of_row = round(rows_x_context / (rows or 1) / GRAIN)
    of_request = round(context_sum / (requests or 1) / GRAIN)
    return rows, samples, requests, of_row, of_request


def _rounded(key: CurveKey) -> StepShape:
    """The step that stands for all of one key."""
    rows, samples, requests, of_row, of_request = key
    seen, read = of_row * GRAIN * rows, of_request * GRAIN
    return StepShape(rows, seen, requests * read, samples, requests)


def _make_room(kept: dict[CurveKey, Any]) -> None:
    if len(kept) >= MAX_CURVES:
        del kept[next(iter(kept))]


def _requests(shape: StepShape) -> int:
    """Of a step, at least one."""
    return max(1, shape.requests)


_WIDTHS = (1, 2, 4, 8, 16, 32)
_RATIOS = {
    "native amx": (1.0, 1.05, 1.16, 1.30, 1.58, 2.26),
    "native avx512vnni": (1.0, 1.05, 1.18, 1.40, 2.28, 4.17),
    "native avx2": (1.0, 1.04, 1.15, 1.87, 4.14, 7.11),
}
"""Time of a forward of so many rows over that of one row, by the operations that compute it.

Medians with two threads. With AVX-512 VNNI the geometric mean over GGUF files of four models of
135 million to 1.5 billion parameters in Q8_0, Q4_K_M and Q4_0 on a Xeon (``benchmarks/peers.py``),
two rows counted as more than one. The others are of int8 forwards of a model of half a billion:
with AMX on a Xeon (the steps of ``paceline profile``), with AVX2 on AMD Zen 3 at a context of 64,
of a run that a later one replaced in the saved results. Reading the weights bounds the narrow
steps, arithmetic the wide ones: beyond the last point every row costs the same.
"""
_WIDER = (64, 128, 256)
"""Widths that matter where reading takes longer than what the widths before them compute."""


def prior_table(
    ops: str = "", experts: ExpertCost | None = None, streamed: float = 0.0
) -> CostTable:
    """In plain steps; every row sampled or not, at every context, of any number of requests.

    Args:
        ops: name of the model's operations; others are taken to be between those that are known.
        experts: of a mixture, which costs as much as a dense model where all rows choose alike.
        streamed: share of the weights that every step reads from disk while it computes.
    """
    return _assumed(ops, experts, streamed)


@cache
def _assumed(ops: str, experts: ExpertCost | None, streamed: float) -> CostTable:
    known = [_RATIOS[ops]] if ops in _RATIOS else list(_RATIOS.values())
    times = dict(zip(_WIDTHS, map(geometric_mean, zip(*known, strict=True)), strict=True))
    each, last = (times[32] - times[16]) / 16, times[32]
    times |= {width: last + each * (width - 32) for width in _WIDER if streamed}
    reading = max(1.0, DISK * streamed)  # in which memory would be read so many times
    read = experts.least if experts else 0
    points = [
        CostPoint(1, 0, width, width, max(1.0, ms / reading), experts=read)
        for width, ms in times.items()
    ]
    name = "assumed: nothing was measured"
    return CostTable(name, points, is_relative=True, experts=experts)
