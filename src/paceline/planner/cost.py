"""What a step costs on this machine at this moment, and what is assumed before it was measured.

    T(step) = table(step) x correction(rows)

The table is what was measured, without smoothing; without a profile it is the prior. What it has
wrong now is learnt in :mod:`paceline.planner.corrections`; for a mixture this includes the experts
that a step reads beyond those of the table's step. Knows neither clock nor model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf, log
from operator import add
from statistics import geometric_mean
from typing import Any

from paceline.planner.corrections import DISK, NOISE, CostFilter, ExpertPrices
from paceline.planner.cost_table import (
    MAX_MS,
    NO_STEP,
    PLAIN_STEP,
    CostPoint,
    CostTable,
    ExpertCost,
    StepShape,
)
from paceline.sampling.sampler import kernels

new_filter: type[CostFilter] = getattr(kernels, "CostFilter", CostFilter)
StepKey = tuple[int, int, int, int, int]
"""Rows, samples and requests, and the mean contexts of a row and of a request in grains."""
GRAIN = 64
"""Contexts are rounded to multiples of this, so that times can be kept."""
HOPE = 0.125
"""The part of its predicted time that width may cost at best where no wide step was seen."""
MAX_CURVES = 4096
"""Curves, and times of single steps, that are kept."""


class CostModel:
    """Predicts the time of a step in milliseconds.

    Without a profile predictions are multiples of the plain step, until the first observation says
    how long that is.

    Args:
        table: of this machine and model; None where there is no profile.
        learns: False freezes the predictions: :meth:`observe` does nothing.
        ops, experts: name of the model's operations, and its mixtures, for what is assumed without
            a profile.
        from_disk: share of the experts that a step reads which is expected to come from disk.
        streamed: share of a dense model's weights that every step reads from disk.
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
        spread = 0.1 if self.has_profile else 0.5  # of the logarithm of the table's own error
        self._filter = new_filter(spread, self.table.is_relative)
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
        self._curves: dict[StepKey, list[float]] = {}
        self._times: dict[StepKey, float] = {}
        self._latest = NO_STEP, (0, 0, 0, 0, 0)

    def predict(self, shape: StepShape) -> float:
        """Milliseconds of a step; contexts are rounded to :data:`GRAIN`."""
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
        latest, key = self._latest
        if shape is not latest:
            key = self._key(shape)
        curve = self._curves.get(key)
        if curve is None or len(curve) <= count:
            _make_room(self._curves)
            curve = self.table.growth(_rounded(key), count + -count % 16)
            self._curves[key] = curve
        times = curve[: count + 1]
        if self._experts is not None:
            price, read = self._experts.ms, self._read.growth(shape, count)
            if experts is None:
                experts = self._experts.union.read(self._unions(shape, read), _requests(shape))
            further = [price * (n - of_table) for n, of_table in zip(experts, read, strict=True)]
            times = [*map(add, times, further)]
        return self._filter.corrected(shape.rows, times) if self.learns else times

    def hoped(self, shape: StepShape, growth: Sequence[float]) -> list[float]:
        """The step's :meth:`growth` if width were as cheap as is still possible."""
        plain, doubts = growth[0], self._filter.doubts(shape.rows, len(growth) - 1)
        return [
            plain + (ms - plain) * HOPE**doubt for ms, doubt in zip(growth, doubts, strict=True)
        ]

    def deviation(self, shape: StepShape) -> float:
        """Standard deviation of the logarithm of a step's time."""
        return self._filter.deviation(shape.rows) if self.learns else 0.0

    def rows_within(self, shape: StepShape, milliseconds: float, limit: int) -> int:
        """Further prefill rows, up to ``limit``, with which the step stays within the time.

        The time is taken to rise with the rows: behind a downward cliff there may be more. The rows
        are not sampled, and their context is the mean context of the step's requests.
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
        """Learn from one step. Impossible times (NaN, infinite, 0, negative) are ignored."""
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
        """The table's time of a step, corrected for its experts if it is a mixture's.

        A single row reads the same number of experts whatever the text.
        """
        latest, key = self._latest
        if shape is not latest:
            key = self._key(shape)
        time = self._times.get(key)
        if time is None:
            _make_room(self._times)
            time = self._times[key] = self.table.step(_rounded(key))
        experts = self._experts
        if experts is None or shape.rows <= 1:
            return time
        of_table, read = self._read.predict(shape), float(shape.experts)
        if not shape.experts:
            (read,) = experts.union.read(self._unions(shape, [of_table]), _requests(shape))
        return max(0.0, time + experts.ms * (read - of_table))

    def _unions(self, shape: StepShape, read: Sequence[float]) -> list[tuple[int, float]]:
        """What :meth:`ExpertUnion.read` takes, of the step with 0, 1, 2, ... further rows.

        What the table's steps ``read`` was not measured without a profile.
        """
        rows = max(1, shape.rows)
        return [
            (rows + further, of_table if self.has_profile else inf)
            for further, of_table in enumerate(read)
        ]

    def _key(self, shape: StepShape) -> StepKey:
        """A step's key, which is kept: several questions in a row are about the same step."""
        rows, rows_x_context, context_sum, samples, requests, *_ = shape
        of_row = round(rows_x_context / (rows or 1) / GRAIN)
        of_request = round(context_sum / (requests or 1) / GRAIN)
        key = rows, samples, requests, of_row, of_request
        self._latest = shape, key
        return key


def _rounded(key: StepKey) -> StepShape:
    """The step that stands for all of one key."""
    rows, samples, requests, of_row, of_request = key
    seen, read = of_row * GRAIN * rows, of_request * GRAIN
    return StepShape(rows, seen, requests * read, samples, requests)


def _make_room(kept: dict[StepKey, Any]) -> None:
    if len(kept) >= MAX_CURVES:
        del kept[next(iter(kept))]


def _requests(shape: StepShape) -> int:
    return max(1, shape.requests)


_WIDTHS = (1, 2, 4, 8, 16, 32)
_RATIOS = {
    "native amx": (1.0, 1.05, 1.16, 1.30, 1.58, 2.26),
    "native avx512vnni": (1.0, 1.05, 1.18, 1.40, 2.28, 4.17),
    "native avx2": (1.0, 1.04, 1.15, 1.87, 4.14, 7.11),
}
"""Time of a forward by its rows over that of one row, by the operations that compute it.

These are medians with two threads. AVX-512 VNNI: the geometric mean over GGUF files of four models
of 135 million to 1.5 billion parameters in Q8_0, Q4_K_M and Q4_0 on a Xeon
(``benchmarks/peers.py``), with two rows counted as more than one. The others are of int8 forwards
of a model of half a billion: AMX on a Xeon (the steps of ``paceline profile``), AVX2 on AMD Zen 3
at a context of 64, from a run that a later one replaced in the saved results. No kernels use AMX;
its ratios count in the mean of all, which operations that are not listed get, since their wide
steps may be as fast. Reading the weights bounds the narrow steps and arithmetic the wide ones, so
beyond the last point every row costs the same.
"""


def prior_table(
    ops: str = "", experts: ExpertCost | None = None, streamed: float = 0.0
) -> CostTable:
    """A table in plain steps that depends on the number of rows alone.

    Args:
        ops: name of the model's operations; others are taken to be between those that are known.
        experts: of a mixture, which costs as much as a dense model where all rows choose alike.
        streamed: share of the weights that every step reads from disk while it computes.
    """
    known = [_RATIOS[ops]] if ops in _RATIOS else list(_RATIOS.values())
    times = dict(zip(_WIDTHS, map(geometric_mean, zip(*known, strict=True)), strict=True))
    if streamed:  # then wider steps may still take no longer than the reading
        of_row, last = (times[32] - times[16]) / 16, times[32]
        times |= {width: last + of_row * (width - 32) for width in (64, 128, 256)}
    reading = max(1.0, DISK * streamed)  # in times of reading the whole from memory
    read = experts.least if experts else 0
    points = [
        CostPoint(1, 0, width, width, max(1.0, ms / reading), experts=read)
        for width, ms in times.items()
    ]
    name = "assumed: nothing was measured"
    return CostTable(name, points, is_relative=True, experts=experts)
