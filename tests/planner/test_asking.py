"""Who is asked for drafts though it has to read the text first."""

from __future__ import annotations

import pytest

from paceline.planner.cost import CostModel
from paceline.planner.cost_table import StepShape
from paceline.planner.pace import StepReport
from paceline.planner.planner import CostAwarePlanner
from paceline.planner.value import Source
from tests.planner.machine import cost_table, request

TO_COME = 24
PLAIN = StepShape(1, 9, 9, 1)


def planner(row_ms: float) -> CostAwarePlanner:
    """Of a machine whose plain steps take 10 milliseconds, and a further row so long."""
    table = cost_table([10.0 + row_ms * row for row in range(300)])
    return CostAwarePlanner(CostModel(table, learns=False))


def is_asked(planner: CostAwarePlanner, lag: int, read_ms: float | None = None) -> bool:
    """Whether the first draft for a request is asked for by a source that lacks so many tokens.

    Args:
        read_ms: of a token that was lacking earlier; None is none.
    """
    behind = Source("draft_model", costs_forwards=True, lag=lambda request: lag)
    each = request(1)
    each.max_len = len(each.token_ids) + TO_COME
    if read_ms is not None:
        times = planner._asking.times
        for lacked in (0, 0, 100):
            times.observe(behind.name, 1, lacked, 0.01 + read_ms * lacked, True)
    planner.set_sources([behind])
    if planner.begin(PLAIN, [each]):
        return False
    planner.drafts.begin([each.request_id])
    return planner.ask(behind, [0]) == [0]


@pytest.mark.parametrize(
    ("row_ms", "lag", "expected"),
    [(10.0, 150, True), (10.0, 250, False), (0.02, 3_000, True), (0.0, 30_000, True)],
)
def test_the_first_text_is_read_where_the_targets_own_rows_are_cheap_enough(
    row_ms: float, lag: int, expected: bool
) -> None:
    """Rows cost next to nothing of a step whose weights come from disk, however long the text."""
    assert is_asked(planner(row_ms), lag) is expected


@pytest.mark.parametrize(("lag", "expected"), [(40, True), (100, False), (400, False)])
def test_reading_has_to_come_back_before_the_request_ends(lag: int, expected: bool) -> None:
    assert is_asked(planner(0.0), lag, read_ms=1.0) is expected


@pytest.mark.parametrize(("lag", "expected"), [(100, True), (400, False)])
def test_what_takes_longer_to_read_than_to_do_without_is_not_explored_either(
    lag: int, expected: bool
) -> None:
    resting = planner(0.0)
    resting.begin(PLAIN, [])
    resting.end(StepReport(PLAIN, 10.0, 900_000.0, 0, 0))
    assert is_asked(resting, lag, read_ms=1.0) is expected
