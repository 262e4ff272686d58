"""What a step costs, read off measured steps. Owns the table and how it is read between its points.

A step's cost depends on five things: its rows, the context that each of them looks at (rows x
context), the context that is read (once per request), the rows that are sampled, and the requests.
A measured :class:`~paceline.planner.cost_points.CostPoint` fixes all five; the table takes them
apart:

* **base**: one request, all rows sampled. A measured width is returned as it was measured, never
  smoothed, because real machines have cliffs, also downward ones. Between widths and between
  contexts it is linear.
* **saving** of rows that are not sampled, as in a prefill chunk, against the base.
* **surcharge** of the same rows coming from several requests, against the base.

Knows no clock, no model and no file; :meth:`CostTable.to_dict` is what files hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from paceline.core.errors import ProfileError
from paceline.planner.cost_points import (
    COLUMNS,
    EXPERT_COLUMNS,
    CostPoint,
    StepShape,
    check_points,
    from_rows,
    to_rows,
)
from paceline.planner.curves import Curve, Floats, arrays, means, on_curve, on_curve_at
from paceline.planner.experts import ExpertCost
from paceline.planner.host_time import NO_HOST_TIME, HostTime

MAX_NAME = 300
_KEYS = ("name", "is_relative", "columns", "points")
_HOST = "host"  # which tables of other engines do not have
_EXPERTS = "experts"  # which only tables of mixtures have


class CostTable:
    """Predicts the time of a step.

    Args:
        name: what was measured, for people.
        points: in any order. At every context with a point of one request whose rows are all
            sampled, there must be one of width 1 among these.
        is_relative: times are multiples of the target's plain step, because nothing is known about
            milliseconds; wherever milliseconds are spoken of, the table gives such multiples.
        host: what a step takes outside of its forwards; no prediction here includes it.
        experts: what those of a mixture cost, beyond those that its points read.

    Raises:
        ProfileError: the points contradict each other, or lack what every table needs.
    """

    def __init__(
        self,
        name: str,
        points: Sequence[CostPoint],
        is_relative: bool = False,
        host: HostTime = NO_HOST_TIME,
        experts: ExpertCost | None = None,
    ) -> None:
        if not 1 <= len(name) <= MAX_NAME:
            raise ProfileError(f"a cost table's name must have 1 to {MAX_NAME} characters")
        check_points(points)
        self.name = name
        self.points = tuple(sorted(points))
        self.is_relative = is_relative
        self.host, self.experts = host, experts
        base: dict[int, list[tuple[float, float]]] = {}
        for p in self.points:
            if p.requests == 1 and p.samples == p.width:
                base.setdefault(p.context, []).append((p.width, p.ms))
        if not base or any(curve[0][0] != 1 for curve in base.values()):
            raise ProfileError(f"the cost table {name!r} has contexts without a step of width 1")
        self._base: list[tuple[int, Curve]] = sorted(base.items())
        self._base_arrays = [arrays(curve) for _, curve in self._base]
        self.contexts = [context for context, _ in self._base]
        self._saved_but_one, self._saved_all = self._savings()
        self._surcharges, self._per_context = self._request_costs()

    # --- reading -------------------------------------------------------------------------------

    def base_points(self, context: int) -> list[CostPoint]:
        """What was measured of one request with all rows sampled, by ascending width."""
        return [
            p
            for p in self.points
            if p.requests == 1 and p.samples == p.width and p.context == context
        ]

    def milliseconds(
        self, rows: int, context: float = 0, samples: int | None = None, requests: int = 1
    ) -> float:
        """Time of a step whose requests all have ``context`` committed tokens.

        Args:
            rows: over all requests.
            samples: rows whose logits are needed; None is all of them.
        """
        sampled = rows if samples is None else samples
        return self.step(StepShape(rows, rows * context, requests * context, sampled, requests))

    def step(self, shape: StepShape) -> float:
        """Time of any step in milliseconds; 0 for one without rows."""
        if shape.rows < 1:
            return 0.0
        time = self._one_request(shape.rows, shape.rows_x_context / shape.rows)
        if shape.samples < shape.rows:
            time -= self._saving(shape.rows, shape.samples)
        if shape.requests > 1:
            time += self._surcharge(shape)
        return max(0.0, time)

    def growth(self, shape: StepShape, count: int) -> Floats:
        """:meth:`step` of a step with 0 to ``count`` further rows, ``[count + 1]``.

        Each is sampled, and its context is the mean context of the step's requests.
        """
        more = np.arange(count + 1, dtype=np.float64)
        rows = shape.rows + more
        context = shape.context_sum / (shape.requests or 1)
        seen = shape.rows_x_context + more * context
        times = self._rows_of_one_request(rows, seen / np.maximum(rows, 1))
        if 1 <= shape.samples < shape.rows:
            unsampled = (shape.rows - shape.samples) / (rows - 1)
            times = times - on_curve_at(arrays(self._saved_but_one), rows) * unsampled
        elif shape.samples < shape.rows:
            times = times - [self._saving(int(r), n) for n, r in enumerate(rows)]
        if shape.requests > 1 and self._surcharges:
            known = [(width, on_curve(curve, shape.requests)) for width, curve in self._surcharges]
            widths = np.minimum(rows / shape.requests, known[-1][0])
            read = seen / rows + (shape.requests - 1) * self.contexts[0]
            beyond = np.maximum(0.0, shape.context_sum - read)
            times = times + on_curve_at(arrays(known), widths) + beyond * self._per_context
        return np.where(rows > 0, np.maximum(times, 0.0), 0.0)

    def cost_ratio(self, width: int, context: float = 0) -> float:
        """Time of one request's step of this width over that of width 1."""
        return self.milliseconds(width, context) / self.milliseconds(1, context)

    def experts_read(self) -> CostTable:
        """The table of a mixture with what its steps read in place of the milliseconds."""
        points = [replace(p, ms=max(1, p.experts), spread=0.0) for p in self.points]
        return CostTable(self.name, points)

    def without_experts(self) -> CostTable:
        """The table as one that does not know what an expert costs."""
        return CostTable(self.name, self.points, self.is_relative, self.host)

    # --- the base ------------------------------------------------------------------------------

    def _one_request(self, rows: float, context: float) -> float:
        """Below the shortest context as there; beyond the longest the last slope goes on."""
        if len(self._base) == 1 or context <= self.contexts[0]:
            return on_curve(self._base[0][1], rows)
        at = min(bisect_left(self.contexts, context), len(self._base) - 1)
        near = self._base[at - 1 : at + 1]
        return on_curve([(c, on_curve(curve, rows)) for c, curve in near], context)

    def _rows_of_one_request(self, rows: Floats, contexts: Floats) -> Floats:
        """:meth:`_one_request` of many steps at once."""
        if len(self._base) == 1:
            return on_curve_at(self._base_arrays[0], rows)
        times = np.stack([on_curve_at(curve, rows) for curve in self._base_arrays])
        known = np.array(self.contexts, dtype=np.float64)
        at = np.clip(np.searchsorted(known, contexts), 1, len(known) - 1)
        each = np.arange(len(rows))
        low, high = times[at - 1, each], times[at, each]
        slope = (high - low) / (known[at] - known[at - 1])
        beyond = contexts > known[-1]
        slope = np.where(beyond, np.maximum(slope, 0.0), slope)
        begin, value = np.where(beyond, known[at], known[at - 1]), np.where(beyond, high, low)
        return np.where(contexts <= known[0], times[0], value + slope * (contexts - begin))

    # --- the saving ----------------------------------------------------------------------------

    def _saving(self, rows: int, samples: int) -> float:
        """What rows without samples save: linear between none, one and all of them sampled."""
        if samples < 1:
            return on_curve(self._saved_all, rows)
        return on_curve(self._saved_but_one, rows) * (rows - samples) / (rows - 1)

    def _savings(self) -> tuple[Curve, Curve]:
        """By rows: what it saves to sample only one of them, and none."""
        but_one: dict[int, list[float]] = {1: [0.0]}
        everything: dict[int, list[float]] = {}
        for p in self.points:
            if p.requests == 1 and p.samples < min(2, p.width):
                # Sampling fewer rows is never more work: less than nothing is the clock's noise.
                saved = max(0.0, self._one_request(p.width, p.context) - p.ms)
                (but_one if p.samples else everything).setdefault(p.width, []).append(saved)
        return means(but_one), means(everything or but_one)

    # --- the surcharge -------------------------------------------------------------------------

    def _surcharge(self, shape: StepShape) -> float:
        """What further requests add to the base of as many rows."""
        if not self._surcharges:
            return 0.0
        curves = [(width, on_curve(curve, shape.requests)) for width, curve in self._surcharges]
        width = min(shape.rows / shape.requests, curves[-1][0])
        # The base has read one context, the mean over the rows; the curves, the shortest ones.
        read = shape.rows_x_context / shape.rows + (shape.requests - 1) * self.contexts[0]
        beyond = max(0.0, shape.context_sum - read)
        return on_curve(curves, width) + beyond * self._per_context

    def _request_costs(self) -> tuple[list[tuple[int, Curve]], float]:
        """Surcharges at the shortest context, by width and requests, and how context adds to them.

        The latter in milliseconds per further request and token of its context.
        """
        curves: dict[int, list[tuple[float, float]]] = {}
        longer: list[tuple[CostPoint, float]] = []
        for p in self.points:
            if p.requests > 1 and p.samples == p.width:
                more = p.ms - self._one_request(p.requests * p.width, p.context)
                if p.context == self.contexts[0]:
                    curves.setdefault(p.width, [(1, 0.0)]).append((p.requests, more))
                elif p.context > self.contexts[0]:
                    longer.append((p, more))
        slopes = [
            (more - on_curve(curves[p.width], p.requests))
            / ((p.requests - 1) * (p.context - self.contexts[0]))
            for p, more in longer
            if p.width in curves
        ]
        per_context = max(0.0, sum(slopes) / len(slopes)) if slopes else 0.0
        return sorted(curves.items()), per_context

    # --- as data -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, which :meth:`from_dict` takes back."""
        columns = EXPERT_COLUMNS if self.experts else COLUMNS
        return {
            "name": self.name,
            "is_relative": self.is_relative,
            "columns": columns,
            "points": to_rows(self.points, columns),
            "host": asdict(self.host),
            **({_EXPERTS: self.experts._asdict()} if self.experts else {}),
        }

    @classmethod
    def from_dict(cls, data: object) -> CostTable:
        """The table that a document describes."""
        optional = _HOST, _EXPERTS
        if not isinstance(data, Mapping) or {*data, *optional} != {*_KEYS, *optional}:
            raise ProfileError(f"a cost table must be an object with {', '.join(_KEYS)}")
        columns = EXPERT_COLUMNS if _EXPERTS in data else COLUMNS
        if data["columns"] != columns:
            raise ProfileError(f"the columns of a cost table must be {', '.join(columns)}")
        if not isinstance(data["name"], str) or not isinstance(data["is_relative"], bool):
            raise ProfileError("a cost table's name must be text, and is_relative true or false")
        host = HostTime.from_dict(data[_HOST]) if _HOST in data else NO_HOST_TIME
        experts = ExpertCost.from_dict(data[_EXPERTS]) if _EXPERTS in data else None
        points = from_rows(data["points"], columns)
        return cls(data["name"], points, data["is_relative"], host, experts)
