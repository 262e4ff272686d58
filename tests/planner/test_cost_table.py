"""The cost table against formulas that it must reproduce, and against damaged documents."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ProfileError
from paceline.planner.cost_table import CostPoint, CostTable, StepShape

WIDTHS = (1, 2, 3, 4, 5, 8, 16, 17, 40)
CONTEXTS = (64, 512, 2048)


def additive(shape: StepShape) -> float:
    """A machine without cliffs: each of the five dimensions costs its share."""
    return (
        2.0
        + 0.3 * shape.rows
        + 0.0002 * shape.rows_x_context
        + 0.001 * shape.context_sum
        + 0.05 * shape.samples
        + 0.7 * shape.requests
    )


def measured(requests: int, context: int, width: int, samples: int) -> CostPoint:
    rows = requests * width
    shape = StepShape(rows, rows * context, requests * context, requests * samples, requests)
    return CostPoint(requests, context, width, samples, additive(shape))


def additive_table() -> CostTable:
    points = [measured(1, c, w, w) for c, w in product(CONTEXTS, WIDTHS)]
    points += [measured(1, 64, w, s) for w in (4, 16, 40) for s in (0, 1)]
    points += [measured(1, 64, 1, 0)]
    points += [measured(r, 64, w, w) for r, w in product((2, 4, 8, 16), (1, 4))]
    points += [measured(4, 512, w, w) for w in (1, 4)]
    return CostTable("additive", points)


@given(
    rows=st.integers(1, 200),
    share=st.floats(0, 1),
    requests=st.integers(1, 40),
    context=st.floats(64, 5000),
)
def test_an_additive_machine_is_reproduced_everywhere(
    rows: int, share: float, requests: int, context: float
) -> None:
    rows = max(rows, requests)
    samples = round(share * rows)
    shape = StepShape(rows, rows * context, requests * context, samples, requests)
    table = additive_table()
    assert table.step(shape) == pytest.approx(additive(shape), rel=1e-9)
    assert table.milliseconds(rows, context, samples, requests) == table.step(shape)


def test_requests_of_different_contexts() -> None:
    """The rows of a step weigh the context that they see, requests the context that is read."""
    # 30 rows over 100 tokens and 2 over 1000.
    shape = StepShape(32, 30 * 100 + 2 * 1000, 1100, 32, 2)
    assert additive_table().step(shape) == pytest.approx(additive(shape), rel=1e-9)


CLIFFS = {1: 10.0, 2: 10.5, 3: 27.0, 4: 21.0, 8: 21.5, 9: 12.0, 16: 13.0}
"""With the downward ones of real machines."""


def cliffs(**more: Any) -> CostTable:
    return CostTable("cliffs", [CostPoint(1, 64, w, w, ms) for w, ms in CLIFFS.items()], **more)


def test_measured_widths_are_not_smoothed() -> None:
    table = cliffs()
    assert {w: table.milliseconds(w) for w in CLIFFS} == CLIFFS
    assert {w: table.milliseconds(w, 5000) for w in CLIFFS} == CLIFFS
    assert table.cost_ratio(3) == 2.7
    between = [w for w in range(1, 17) if w not in CLIFFS]
    expected = np.interp(between, list(CLIFFS), list(CLIFFS.values()))
    assert [table.milliseconds(w) for w in between] == pytest.approx(expected)


def test_beyond_the_last_width() -> None:
    assert cliffs().milliseconds(30) == pytest.approx(13.0 + 14 / 7)
    falling = CostTable("falling", [CostPoint(1, 0, 1, 1, 5.0), CostPoint(1, 0, 2, 2, 4.0)])
    assert falling.milliseconds(10) == 4.0


def test_contexts_of_different_widths() -> None:
    """A context that is too long for the widest steps takes their slope from its own."""
    short = [CostPoint(1, 100, w, w, float(w)) for w in (1, 2, 10)]
    long = [CostPoint(1, 200, w, w, 3.0 * w) for w in (1, 2)]
    table = CostTable("ragged", short + long)
    assert table.milliseconds(10, 150) == pytest.approx((10 + 30) / 2)
    assert table.milliseconds(10, 300) == pytest.approx(50)
    assert [point.width for point in table.base_points(200)] == [1, 2]


def test_without_the_other_measurements_they_cost_nothing() -> None:
    table = cliffs()
    assert table.milliseconds(8, samples=0, requests=4) == table.milliseconds(8)
    assert table.milliseconds(0) == 0.0


def test_noise_does_not_make_fewer_samples_dearer() -> None:
    points = [CostPoint(1, 0, 1, 1, 5.0), CostPoint(1, 0, 8, 8, 6.0), CostPoint(1, 0, 8, 1, 6.5)]
    assert CostTable("noisy", points).milliseconds(8, samples=1) == 6.0


def test_round_trip() -> None:
    table = additive_table()
    again = CostTable.from_dict(json.loads(json.dumps(table.to_dict())))
    assert (again.name, again.points, again.is_relative) == (table.name, table.points, False)
    relative = cliffs(is_relative=True)
    assert CostTable.from_dict(relative.to_dict()).is_relative


GOOD = [1, 64, 1, 1, 10.0, 0.1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": []}, "without a step of width 1"),
        ({"points": None}, "must be a list"),
        ({"points": [GOOD, GOOD]}, "two points of the same step"),
        ({"points": [[1, 64, 2, 2, 10.0, 0.1]]}, "without a step of width 1"),
        ({"points": [GOOD, [1, 512, 2, 2, 10.0, 0.1]]}, "without a step of width 1"),
        ({"points": [GOOD[:5]]}, "6 numbers"),
        ({"points": [[0, *GOOD[1:]]]}, "requests of a cost point is 0"),
        ({"points": [[1, -1, *GOOD[2:]]]}, "context of a cost point is -1"),
        ({"points": [[1, 64, 1.0, *GOOD[3:]]]}, "width of a cost point is 1.0"),
        ({"points": [[1, 64, True, *GOOD[3:]]]}, "width of a cost point is True"),
        ({"points": [[1, 64, 1 << 40, *GOOD[3:]]]}, "width of a cost point"),
        ({"points": [[1, 64, 1, 2, 10.0, 0.1]]}, "2 of 1 rows"),
        ({"points": [[1, 64, 1, 1, 0.0, 0.1]]}, "ms of a cost point is 0.0"),
        ({"points": [[1, 64, 1, 1, float("nan"), 0.1]]}, "ms of a cost point is nan"),
        ({"points": [[1, 64, 1, 1, "10", 0.1]]}, "ms of a cost point is '10'"),
        ({"points": [[1, 64, 1, 1, 10.0, float("inf")]]}, "spread of a cost point is inf"),
        ({"columns": ["requests"]}, "columns"),
        ({"name": ""}, "name"),
        ({"name": 1}, "name"),
        ({"is_relative": 1}, "is_relative"),
        ({"more": 1}, "must be an object with"),
    ],
)
def test_damaged_documents_are_refused(change: dict[str, Any], message: str) -> None:
    document = {**CostTable("one", [CostPoint(*GOOD)]).to_dict(), **change}
    with pytest.raises(ProfileError, match=message):
        CostTable.from_dict(document)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
def test_no_document_raises_anything_else(junk: object) -> None:
    for document in (junk, {**cliffs().to_dict(), "points": junk}):
        with pytest.raises(ProfileError):
            CostTable.from_dict(document)


@given(
    rows=st.integers(1, 80),
    unsampled=st.integers(0, 80),
    requests=st.integers(1, 9),
    context=st.integers(0, 5000),
    prompt=st.integers(0, 3000),
)
def test_growth_is_step_by_step(
    rows: int, unsampled: int, requests: int, context: int, prompt: int
) -> None:
    points = [
        CostPoint(1, c, w, w, 5 + 0.01 * c + w**1.2) for c in (16, 256, 1024) for w in (1, 2, 5, 40)
    ]
    points += [CostPoint(1, 16, w, s, 4 + w**1.2 + s) for w in (5, 40) for s in (0, 1)]
    points += [CostPoint(r, c, 2, 2, 8 + r * c / 90) for r in (2, 8) for c in (16, 256)]
    table = CostTable("t", points)
    samples = max(0, rows - unsampled)
    shape = StepShape(rows, rows * context + prompt, requests * context, samples, requests)
    expected = [
        table.step(
            StepShape(
                rows + n,
                rows * context + prompt + n * context,
                requests * context,
                samples + n,
                requests,
            )
        )
        for n in range(20)
    ]
    assert table.growth(shape, 19) == pytest.approx(expected, rel=1e-9)
