"""Measured times: of a step's forward, and of what the host does outside of it.

A measured :class:`CostPoint` fixes all facts of a :class:`StepShape`; :class:`CostTable` reads any
step off its points in three parts:

* **base**: the time of one request all of whose rows are sampled. A measured width is never
  smoothed, because machines have cliffs in both directions; between widths and between contexts the
  time is linear.
* **saving**: what rows that are not sampled, such as a prefill chunk's, take less than the base.
* **surcharge**: what the same rows take more when they belong to several requests.

:class:`HostTime` is linear in requests, drafts and draft nodes. Knows no clock, model or file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from math import inf
from typing import Any, NamedTuple

from paceline.core.checks import check_number
from paceline.core.errors import ProfileError

MAX_COUNT = 1 << 24
MAX_MS = 1e12


class StepShape(NamedTuple):  # made several times per step: a frozen dataclass takes thrice as long
    """What the cost of a step depends on."""

    rows: int  # over all requests, each of which may have a different number
    rows_x_context: float  # sum over rows of the committed tokens of the row's request
    context_sum: float  # sum over requests of their committed tokens
    samples: int  # rows whose logits are needed
    requests: int = 1
    experts: int = 0  # pairs of a layer and an expert that were read; 0 where that is unknown
    fetched: int = 0  # those of them that came from disk


NO_STEP = StepShape(0, 0, 0, 0, 0)
PLAIN_STEP = StepShape(1, 0, 0, 1)


@dataclass(frozen=True, slots=True, order=True)
class CostPoint:
    """A measured step in which all requests have equal spans."""

    requests: int
    context: int  # committed tokens of each request
    width: int  # rows of each span
    samples: int  # sampled rows of each span
    ms: float  # median time in milliseconds; in a relative table, in plain steps
    spread: float = 0.0  # range of the middle half of the measurements, in the unit of ms
    experts: int = 0  # that the step read, each counted once per layer

    def check(self) -> None:
        """Raise :class:`ProfileError` where no step can be like this."""
        least = {"requests": 1, "context": 0, "width": 1, "samples": 0, "experts": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            check_number(f"{name} of a cost point", value, lowest, MAX_COUNT, int, ProfileError)
        if self.samples > self.width:
            raise ProfileError(f"{self.samples} of {self.width} rows of a point are sampled")
        if type(self.ms) not in (int, float) or not 0 < self.ms <= MAX_MS:
            raise ProfileError(f"ms of a cost point is {self.ms!r}; allowed: numbers above 0")
        check_number("spread of a cost point", self.spread, 0, MAX_MS, float, ProfileError)


def _columns(has_experts: bool) -> list[str]:
    """The columns of a table's points in a file."""
    names = [column.name for column in fields(CostPoint)]
    return names if has_experts else names[:-1]


def _points(rows: object, columns: Sequence[str]) -> list[CostPoint]:
    """Points from a file; raises :class:`ProfileError` naming the first row that is not one."""
    if not isinstance(rows, list) or len(rows) > 100_000:
        raise ProfileError("the points of a cost table must be a list of at most 100000")
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(columns):
            raise ProfileError(f"point {index} must be a list of {len(columns)} numbers")
    return [CostPoint(*row) for row in rows]


class ExpertCost(NamedTuple):
    """The mixtures of a model."""

    layers: int  # that are mixtures
    number: int  # experts of each of these layers
    per_token: int  # experts of each layer that a row chooses
    ms: float  # in which one expert of one layer is read, in the unit of the table

    @property
    def least(self) -> int:
        """Experts that a single row reads."""
        return self.layers * self.per_token

    @classmethod
    def from_dict(cls, data: object) -> ExpertCost:
        """Read what ``_asdict`` made; raises :class:`ProfileError` where it is anything else."""
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


def _check_times(times: Iterable[float]) -> None:
    for value in times:
        check_number("a host time", value, 0, MAX_MS, float, ProfileError)


def _arguments(cls: type[Any], data: object, optional: Iterable[str] = ()) -> dict[str, Any]:
    """A document's values by field; :class:`ProfileError` where a key is missing or unknown."""
    known = {column.name for column in fields(cls)}
    if not isinstance(data, Mapping) or not known.difference(optional) <= set(data) <= known:
        raise ProfileError(f"a host time must be an object with {', '.join(sorted(known))}")
    return dict(data)


@dataclass(frozen=True, slots=True)
class DraftingHostTime:
    """What a call of a draft model takes in addition to its forwards, in milliseconds.

    Raises:
        ProfileError: a value is not a number from 0 on.
    """

    call: float = 0.0  # with one request and one level
    level: float = 0.0  # for each further level
    request: float = 0.0  # for each further request, in each level
    node: float = 0.0  # for each further node of a request's level

    def __post_init__(self) -> None:
        _check_times([self.call, self.level, self.request, self.node])

    def first_level(self, requests: int, nodes: int = 1) -> float:
        """Milliseconds of a call with one level of ``nodes`` nodes per request."""
        return self.call + self._further(requests, nodes)

    def further_level(self, requests: int, nodes: int = 1) -> float:
        """Milliseconds that a further level of ``nodes`` nodes per request adds."""
        return self.level + self._further(requests, nodes)

    def _further(self, requests: int, nodes: int) -> float:
        return self.request * (requests - 1) + self.node * requests * (nodes - 1)


NO_DRAFTING_HOST_TIME = DraftingHostTime()


@dataclass(frozen=True, slots=True)
class HostTime:
    """What the host takes in a step in which all requests decode, in milliseconds.

    Raises:
        ProfileError: a value is not a number from 0 on.
    """

    step: float = 0.0  # with one request and no draft
    request: float = 0.0  # for each further request
    draft: float = 0.0  # for one draft: packing, verifying and committing take longer
    further_draft: float = 0.0  # for each further request's draft, its proposing included
    ask: float = 0.0  # where any proposer is asked: planning, the choice of nodes included
    node: float = 0.0  # for each draft node
    calls: Mapping[str, float] = field(default_factory=dict)
    """For each proposer without forwards that is asked, by method."""
    merge: float = 0.0  # for merging two trees of a request
    drafting: DraftingHostTime = NO_DRAFTING_HOST_TIME  # where the model drafts for another

    def __post_init__(self) -> None:
        if not isinstance(self.calls, Mapping) or not all(type(key) is str for key in self.calls):
            raise ProfileError(f"a host time's calls are {self.calls!r}, not times by methods")
        times = [self.step, self.request, self.draft, self.further_draft, self.ask, self.node]
        _check_times([*times, *self.calls.values(), self.merge])

    def of(
        self, requests: int, drafts: int, nodes: int = 0, asked: bool = False, merges: int = 0
    ) -> float:
        """Milliseconds of a step, calls left out.

        Args:
            drafts: requests that have a draft.
            nodes: of all drafts together.
            merges: trees that were drafted beyond the first of each request.
        """
        time = self.step + self.request * (requests - 1) + self.ask * asked + self.merge * merges
        if drafts:
            time += self.draft + self.further_draft * (drafts - 1) + self.node * nodes
        return time

    def call(self, method: str) -> float:
        """Milliseconds of asking a proposer; the slowest one's where this one was not measured."""
        return self.calls.get(method, max(self.calls.values(), default=0.0))

    @classmethod
    def from_dict(cls, data: object) -> HostTime:
        """Read a document, in which what older versions did not measure may be missing.

        Raises:
            ProfileError: a key is missing or unknown, or a value is wrong.
        """
        values = _arguments(cls, data, ("ask", "node", "calls", "merge", "drafting"))
        if "drafting" in values:
            drafting = _arguments(DraftingHostTime, values["drafting"])
            values["drafting"] = DraftingHostTime(**drafting)
        return cls(**values)

    def completed_by(self, other: HostTime) -> HostTime:
        """These times, and the other's for the role (target or draft) that was not measured."""
        drafting = self.drafting
        if drafting == NO_DRAFTING_HOST_TIME:
            drafting = other.drafting
        is_known = replace(self, drafting=NO_DRAFTING_HOST_TIME) != NO_HOST_TIME
        return replace(self if is_known else other, drafting=drafting)


NO_HOST_TIME = HostTime()
Curve = Sequence[tuple[float, float]]
"""Points (x, y) with ascending x."""


def _on_curve(curve: Curve, x: float) -> float:
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


def _mean_curve(values: Mapping[int, Sequence[float]]) -> Curve:
    """The curve through the mean of the values at each place."""
    return [(x, sum(ys) / len(ys)) for x, ys in sorted(values.items())]


class CostTable:
    """Predicts the time of a step.

    Args:
        name: what was measured, for people.
        points: in any order. Every context with a point of one request whose rows are all sampled
            needs such a point of width 1.
        is_relative: all times are multiples of the target's plain step, not milliseconds.
        host: what a step takes outside of its forwards; no prediction here includes it.
        experts: what experts cost that a step reads beyond those of its points.

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
        if not 1 <= len(name) <= 300:
            raise ProfileError("a cost table's name must have 1 to 300 characters")
        for point in points:
            point.check()
        if len({(p.requests, p.context, p.width, p.samples) for p in points}) != len(points):
            raise ProfileError("a cost table has two points of the same step")
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
        self.contexts = [context for context, _ in self._base]
        self._saved_but_one, self._saved_all = self._savings()
        self._surcharges, self._per_context = self._request_costs()
        self._surcharge_by_width: dict[int, Curve] = {}

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

        ``samples`` of the rows of all requests are sampled; None is all of them.
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

    def growth(self, shape: StepShape, count: int) -> list[float]:
        """:meth:`step` of a step with 0 to ``count`` further rows, ``[count + 1]``.

        Each is sampled, and its context is the mean context of the step's requests.
        """
        rows, seen, context_sum, samples, requests, *_ = shape
        context = context_sum / (requests or 1)
        return [
            self.step(StepShape(rows + n, seen + n * context, context_sum, samples + n, requests))
            for n in range(count + 1)
        ]

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
            return _on_curve(self._base[0][1], rows)
        at = min(bisect_left(self.contexts, context), len(self._base) - 1)
        near = self._base[at - 1 : at + 1]
        return _on_curve([(c, _on_curve(curve, rows)) for c, curve in near], context)

    # --- the saving ----------------------------------------------------------------------------

    def _saving(self, rows: int, samples: int) -> float:
        """What rows without samples save: linear between none, one and all of them sampled."""
        if samples < 1:
            return _on_curve(self._saved_all, rows)
        return _on_curve(self._saved_but_one, rows) * (rows - samples) / (rows - 1)

    def _savings(self) -> tuple[Curve, Curve]:
        """By rows: what it saves to sample only one of them, and none."""
        but_one: dict[int, list[float]] = {1: [0.0]}
        everything: dict[int, list[float]] = {}
        for p in self.points:
            if p.requests == 1 and p.samples < min(2, p.width):
                # Sampling fewer rows is never more work: less than nothing is the clock's noise.
                saved = max(0.0, self._one_request(p.width, p.context) - p.ms)
                (but_one if p.samples else everything).setdefault(p.width, []).append(saved)
        return _mean_curve(but_one), _mean_curve(everything or but_one)

    # --- the surcharge -------------------------------------------------------------------------

    def _surcharge(self, shape: StepShape) -> float:
        """What further requests add to the base of as many rows."""
        if not self._surcharges:
            return 0.0
        by_width = self._surcharge_of(shape.requests)
        width = min(shape.rows / shape.requests, by_width[-1][0])
        # The base has read one context, the mean over the rows; the curves, the shortest ones.
        read = shape.rows_x_context / shape.rows + (shape.requests - 1) * self.contexts[0]
        beyond = max(0.0, shape.context_sum - read)
        return _on_curve(by_width, width) + beyond * self._per_context

    def _surcharge_of(self, requests: int) -> Curve:
        """By width, what this many requests add; kept, because steps in turn have as many."""
        curve = self._surcharge_by_width.get(requests)
        if curve is None:
            curve = [(width, _on_curve(curve, requests)) for width, curve in self._surcharges]
            self._surcharge_by_width[requests] = curve
        return curve

    def _request_costs(self) -> tuple[list[tuple[int, Curve]], float]:
        """Surcharges at the shortest context, by width and requests, and what each token of each
        further request's context adds to them."""
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
            (more - _on_curve(curves[p.width], p.requests))
            / ((p.requests - 1) * (p.context - self.contexts[0]))
            for p, more in longer
            if p.width in curves
        ]
        per_context = max(0.0, sum(slopes) / len(slopes)) if slopes else 0.0
        return sorted(curves.items()), per_context

    # --- as data -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, which :meth:`from_dict` takes back."""
        columns = _columns(self.experts is not None)
        return {
            "name": self.name,
            "is_relative": self.is_relative,
            "columns": columns,
            "points": [list(astuple(point)[: len(columns)]) for point in self.points],
            "host": asdict(self.host),
            **({"experts": self.experts._asdict()} if self.experts else {}),
        }

    @classmethod
    def from_dict(cls, data: object) -> CostTable:
        """The table that a document describes.

        Raises:
            ProfileError: the document is not a table's.
        """
        keys = ("name", "is_relative", "columns", "points")
        optional = {"host", "experts"}
        if not isinstance(data, Mapping) or {*data, *optional} != {*keys, *optional}:
            raise ProfileError(f"a cost table must be an object with {', '.join(keys)}")
        columns = _columns("experts" in data)
        if data["columns"] != columns:
            raise ProfileError(f"the columns of a cost table must be {', '.join(columns)}")
        if not isinstance(data["name"], str) or not isinstance(data["is_relative"], bool):
            raise ProfileError("a cost table's name must be text, and is_relative true or false")
        host = HostTime.from_dict(data["host"]) if "host" in data else NO_HOST_TIME
        experts = ExpertCost.from_dict(data["experts"]) if "experts" in data else None
        points = _points(data["points"], columns)
        return cls(data["name"], points, data["is_relative"], host, experts)
