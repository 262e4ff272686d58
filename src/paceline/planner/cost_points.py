"""The records of a cost table, and what a valid one is.

Owns no prediction: that is :mod:`paceline.planner.cost_table`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

from paceline.core.checks import check_number
from paceline.core.errors import ProfileError

MAX_POINTS = 100_000
MAX_COUNT = 1 << 24
MAX_MS = 1e12
_LEAST = {"requests": 1, "context": 0, "width": 1, "samples": 0, "experts": 0}


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
