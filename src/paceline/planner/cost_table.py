"""Measured times: of a step's forward, read off measured steps, and of the host outside of it.

A step's cost depends on five things (:class:`StepShape`): its rows, the context that each of them
looks at (rows x context), the context that is read (once per request), the rows that are sampled,
and the requests. A measured :class:`CostPoint` fixes all five; :class:`CostTable` takes them apart:

* **base**: one request, all rows sampled. A measured width is returned as it was measured, never
  smoothed, because real machines have cliffs, also downward ones. Between widths and between
  contexts it is linear.
* **saving** of rows that are not sampled, as in a prefill chunk, against the base.
* **surcharge** of the same rows coming from several requests, against the base.

:class:`HostTime` is linear in requests, drafts and draft nodes. Measures nothing itself and knows
no clock, no model and no file; :meth:`CostTable.to_dict` is what files hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.checks import check_number
from paceline.core.errors import ProfileError

MAX_POINTS = 100_000
MAX_COUNT = 1 << 24
MAX_MS = 1e12
MAX_NAME = 300
_LEAST = {"requests": 1, "context": 0, "width": 1, "samples": 0, "experts": 0}
_DRAFTING = "drafting"
_NOT_ALWAYS_MEASURED = {"ask", "node", "calls", "merge", _DRAFTING}
_KEYS = ("name", "is_relative", "columns", "points")
_HOST = "host"  # which tables of other engines do not have
_EXPERTS = "experts"  # which only tables of mixtures have


class StepShape(NamedTuple):  # made several times per step: a frozen dataclass takes thrice as long
    """What the cost of any step depends on.

    Attributes:
        rows: over all requests, which need not have equally many.
        rows_x_context: sum over rows of the committed tokens of the row's request.
        context_sum: sum over requests of their committed tokens.
        samples: rows whose logits are needed.
        requests: spans in the step.
        experts: pairs of a layer and an expert that it read; 0 where that is not known yet, and
            where no layer is a mixture.
        fetched: of these, those that came from disk.
    """

    rows: int
    rows_x_context: float
    context_sum: float
    samples: int
    requests: int = 1
    experts: int = 0
    fetched: int = 0


NO_STEP = StepShape(0, 0, 0, 0, 0)
PLAIN_STEP = StepShape(1, 0, 0, 1)


@dataclass(frozen=True, slots=True, order=True)
class CostPoint:
    """One measured step: equal spans of some requests.

    Attributes:
        requests: spans in the step.
        context: committed tokens of each request.
        width: rows of each span.
        samples: sampled rows of each span.
        ms: median time in milliseconds; in a relative table, in plain steps.
        spread: range that the middle half of the measurements covers, in the same unit.
        experts: of mixtures, that the step read, each counted once per layer.
    """

    requests: int
    context: int
    width: int
    samples: int
    ms: float
    spread: float = 0.0
    experts: int = 0


EXPERT_COLUMNS = [field.name for field in fields(CostPoint)]
COLUMNS = EXPERT_COLUMNS[:-1]
"""Of tables of models without mixtures."""


def to_rows(points: Sequence[CostPoint], columns: Sequence[str]) -> list[list[Any]]:
    """A list of numbers per point, in the order of all columns or of the first ones."""
    return [list(astuple(point)[: len(columns)]) for point in points]


def from_rows(rows: object, columns: Sequence[str]) -> list[CostPoint]:
    """Points out of what :func:`to_rows` made.

    Raises:
        ProfileError: naming the first row that is not a point.
    """
    if not isinstance(rows, list) or len(rows) > MAX_POINTS:
        raise ProfileError(f"the points of a cost table must be a list of at most {MAX_POINTS}")
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(columns):
            raise ProfileError(f"point {index} must be a list of {len(columns)} numbers")
    return [CostPoint(*row) for row in rows]


def check_points(points: Sequence[CostPoint]) -> None:
    """Raise :class:`ProfileError` unless each point could be one and no two are of one step."""
    steps = set()
    for point in points:
        for name, least in _LEAST.items():
            value = getattr(point, name)
            check_number(f"{name} of a cost point", value, least, MAX_COUNT, int, ProfileError)
        if point.samples > point.width:
            raise ProfileError(f"{point.samples} of {point.width} rows of a point are sampled")
        if type(point.ms) not in (int, float) or not 0 < point.ms <= MAX_MS:
            raise ProfileError(f"ms of a cost point is {point.ms!r}; allowed: numbers above 0")
        check_number("spread of a cost point", point.spread, 0, MAX_MS, float, ProfileError)
        steps.add((point.requests, point.context, point.width, point.samples))
    if len(steps) != len(points):
        raise ProfileError("a cost table has two points of the same step")


class ExpertCost(NamedTuple):
    """The mixtures of a model.

    Attributes:
        layers: that are mixtures.
        number: experts of each.
        per_token: experts that a row chooses in each.
        ms: in which one expert of one layer is read; in plain steps in a relative table.
    """

    layers: int
    number: int
    per_token: int
    ms: float

    @property
    def least(self) -> int:
        """Experts that a single row reads."""
        return self.layers * self.per_token

    @classmethod
    def from_dict(cls, data: object) -> ExpertCost:
        """What ``_asdict`` made; ``ProfileError`` if it is no such thing."""
        if not isinstance(data, Mapping) or set(data) != set(cls._fields):
            raise ProfileError(f"experts of a cost table must have {', '.join(cls._fields)}")
        cost = cls(**data)
        for name in ("layers", "number", "per_token"):
            value = getattr(cost, name)
            check_number(f"{name} of experts", value, 1, MAX_COUNT, int, ProfileError)
        check_number("ms of an expert", cost.ms, 0, MAX_MS, float, ProfileError)
        if cost.per_token > cost.number:
            raise ProfileError(f"a row chooses {cost.per_token} of {cost.number} experts")
        return cost


def _check(times: Iterable[float]) -> None:
    for value in times:
        check_number("a host time", value, 0, MAX_MS, float, ProfileError)


def _parts(of: type[Any], data: object, optional: Collection[str] = ()) -> dict[str, Any]:
    """Raises :class:`ProfileError` where a key is missing or unknown."""
    known = {each.name for each in fields(of)}
    if not isinstance(data, Mapping) or not known - set(optional) <= set(data) <= known:
        raise ProfileError(f"a host time must be an object with {', '.join(sorted(known))}")
    return dict(data)


@dataclass(frozen=True, slots=True)
class DraftingHostTime:
    """What a call of a model that drafts takes beyond what its forwards take by its table.

    Attributes:
        call: with one request and one level.
        level: that each further level adds.
        request: that each further request adds to each level.
        node: that each further node of a request's level adds.

    Raises:
        ProfileError: a value is no number from 0 on.
    """

    call: float = 0.0
    level: float = 0.0
    request: float = 0.0
    node: float = 0.0

    def __post_init__(self) -> None:
        _check([self.call, self.level, self.request, self.node])

    def first_level(self, requests: int, nodes: int = 1) -> float:
        """Milliseconds of a call with one level, of so many nodes per request."""
        return self.call + self._more(requests, nodes)

    def further_level(self, requests: int, nodes: int = 1) -> float:
        """Milliseconds that a level of so many nodes per request adds."""
        return self.level + self._more(requests, nodes)

    def _more(self, requests: int, nodes: int) -> float:
        return self.request * (requests - 1) + self.node * requests * (nodes - 1)

    @classmethod
    def from_dict(cls, data: object) -> DraftingHostTime:
        """Raises :class:`ProfileError` where a key is missing or unknown, or a value is wrong."""
        return cls(**_parts(cls, data))


NO_DRAFTING_HOST_TIME = DraftingHostTime()


@dataclass(frozen=True, slots=True)
class HostTime:
    """What the host takes in a step in which all requests decode.

    Attributes:
        step: with one request and no draft.
        request: that each further request adds.
        draft: that a draft adds to planning: packing, verifying and committing more.
        further_draft: that the draft of each further request adds, proposing it included.
        ask: that planning adds where any proposer is asked, choosing from its draft included.
        node: that each draft node adds.
        calls: that each proposer that is asked adds, whether or not it drafts anything; by method,
            of those that need no forwards.
        merge: that making one tree of a request's two adds.
        drafting: where the model drafts for another; the rest is where it is drafted for.

    Raises:
        ProfileError: a value is no number from 0 on.
    """

    step: float = 0.0
    request: float = 0.0
    draft: float = 0.0
    further_draft: float = 0.0
    ask: float = 0.0
    node: float = 0.0
    calls: Mapping[str, float] = field(default_factory=dict)
    merge: float = 0.0
    drafting: DraftingHostTime = NO_DRAFTING_HOST_TIME

    def __post_init__(self) -> None:
        if not isinstance(self.calls, Mapping) or not all(type(key) is str for key in self.calls):
            raise ProfileError(f"a host time's calls are {self.calls!r}, not times by methods")
        times = [self.step, self.request, self.draft, self.further_draft, self.ask, self.node]
        _check([*times, *self.calls.values(), self.merge])

    def of(
        self, requests: int, drafts: int, nodes: int = 0, asked: bool = False, merges: int = 0
    ) -> float:
        """Milliseconds of a step, calls left out.

        Args:
            requests: that decode, at least one.
            drafts: requests of these that have one.
            nodes: of all drafts together.
            asked: whether any proposer was asked.
            merges: trees that were drafted beyond the first of each request.
        """
        time = self.step + self.request * (requests - 1) + self.ask * asked + self.merge * merges
        if drafts:
            time += self.draft + self.further_draft * (drafts - 1) + self.node * nodes
        return time

    def call(self, method: str) -> float:
        """Milliseconds of asking a proposer; of one that was not measured those of the slowest."""
        return self.calls.get(method, max(self.calls.values(), default=0.0))

    @classmethod
    def from_dict(cls, data: object) -> HostTime:
        """Raises :class:`ProfileError` where a key is missing or unknown, or a value is wrong."""
        parts = _parts(cls, data, _NOT_ALWAYS_MEASURED)
        if _DRAFTING in parts:
            parts[_DRAFTING] = DraftingHostTime.from_dict(parts[_DRAFTING])
        return cls(**parts)

    def completed_by(self, other: HostTime) -> HostTime:
        """With what another one knows where nothing was measured: drafted for, or drafting."""
        drafting = self.drafting
        if drafting == NO_DRAFTING_HOST_TIME:
            drafting = other.drafting
        is_known = replace(self, drafting=NO_DRAFTING_HOST_TIME) != NO_HOST_TIME
        return replace(self if is_known else other, drafting=drafting)


NO_HOST_TIME = HostTime()
Floats = npt.NDArray[np.float64]
Curve = Sequence[tuple[float, float]]
"""Points (x, y) with ascending x."""


def on_curve(curve: Curve, x: float) -> float:
    """A curve's value: linear between its points, constant before the first.

    Beyond the last point the last slope goes on, unless it falls: more work is not free.
    """
    at = bisect_left(curve, (x, -inf))
    if at < len(curve) and (at == 0 or curve[at][0] == x):
        return curve[at][1]
    if len(curve) == 1:
        return curve[0][1]
    (x0, y0), (x1, y1) = curve[at - 1 : at + 1] if at < len(curve) else curve[-2:]
    slope = (y1 - y0) / (x1 - x0)
    return y0 + slope * (x - x0) if at < len(curve) else y1 + max(0.0, slope) * (x - x1)


def means(values: Mapping[int, Sequence[float]]) -> Curve:
    """The curve through the mean of what there is at each place."""
    return [(x, sum(ys) / len(ys)) for x, ys in sorted(values.items())]


def arrays(curve: Curve) -> tuple[Floats, Floats]:
    """A curve as :func:`on_curve_at` takes it."""
    x, y = np.array(curve, dtype=np.float64).T
    return x, y


def on_curve_at(curve: tuple[Floats, Floats], xs: Floats) -> Floats:
    """:func:`on_curve` at many ascending places at once."""
    x, y = curve
    values: Floats = np.interp(xs, x, y)
    if xs[-1] > x[-1] and len(x) > 1:
        slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
        values = values + slope * np.maximum(0.0, xs - x[-1])
    return values


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
