"""The cost model: the table as it is, its units, and when it learns at all."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from paceline.planner import cost
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import StepShape
from tests.planner.test_cost_table import CLIFFS, additive_table, cliffs


def step(width: int) -> StepShape:
    return StepShape(width, 300 * width, 300, width)


# --- reading the table ---------------------------------------------------------------------------


def test_cliffs_are_kept_both_ways() -> None:
    table = cliffs()
    model = CostModel(table)
    expected = [table.milliseconds(width) for width in range(1, 18)]
    assert model.growth(step(1), 16) == expected
    assert model.growth(step(3), 5) == expected[2:8], "from elsewhere, and out of the kept curves"
    for _ in range(50):
        model.observe(step(1), 20.0)
    times = model.growth(step(1), 16)
    for low, high in ((2, 3), (3, 4), (8, 9)):
        ratio = CLIFFS[high] / CLIFFS[low]
        assert times[high - 1] / times[low - 1] == pytest.approx(ratio, rel=0.02)


def test_every_dimension_of_a_step_counts() -> None:
    """Further nodes are sampled rows that see the mean context of the step's requests."""
    table, model = additive_table(), CostModel(additive_table())
    shape = StepShape(40, 30 * 128 + 10 * 640, 2 * 640 + 128, 12, 3)  # rows see 256 on average
    mean = (2 * 640 + 128) / 3
    expected = [
        table.step(StepShape(40 + n, 40 * 256 + n * mean, 3 * mean, 12 + n, 3)) for n in range(21)
    ]
    assert model.growth(shape, 20) == pytest.approx(expected, rel=0.01)
    assert model.predict(shape) == model.growth(shape, 3)[0]
    assert model.predict(StepShape(0, 0, 0, 0, 0)) == 0.0


def test_steps_wider_than_any_residual() -> None:
    model = CostModel(additive_table())
    model.observe(StepShape(5000, 0, 0, 1), 3000.0)
    times = model.growth(StepShape(1020, 0, 0, 1), 10)
    assert len(times) == 11
    assert times == sorted(times)
    assert times[-1] == pytest.approx(model.predict(StepShape(1030, 0, 0, 11)))


def test_curves_that_are_dropped_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [StepShape(n, n * 100 * n, 100 * n, n) for n in range(1, 12)]
    model = CostModel(additive_table())
    expected = [model.growth(shape, 5) for shape in shapes]
    monkeypatch.setattr(cost, "MAX_CURVES", 3)
    small = CostModel(additive_table())
    for _ in range(2):
        assert [small.growth(shape, 5) for shape in shapes] == expected
    assert len(small._curves) == 3


# --- units and freezing --------------------------------------------------------------------------


def test_a_relative_table_is_in_milliseconds_once_one_step_was_seen() -> None:
    model = CostModel(cliffs(is_relative=True))
    assert model.has_profile
    assert model.predict(step(3)) == 27.0
    model.observe(step(3), 2.7)
    assert model.growth(step(1), 3) == pytest.approx([1.0, 1.05, 2.7, 2.1])


def test_nothing_is_throttled_before_anything_is_known() -> None:
    for model in (CostModel(), CostModel(cliffs(is_relative=True))):
        assert model.rows_within(step(1), 1e-6, 77) == 77
        model.observe(step(1), 5.0)
        assert model.rows_within(step(1), 1e-6, 77) == 0
    assert CostModel(cliffs()).rows_within(step(1), 1e-6, 77) == 0
    assert not CostModel().has_profile


def test_a_frozen_model_learns_nothing() -> None:
    shapes = [step(width) for width in (1, 2, 9, 300)]
    for table in (cliffs(), cliffs(is_relative=True), None):
        model, other = CostModel(table, learns=False), CostModel(table, learns=False)
        before = [model.growth(shape, 9) for shape in shapes]
        for shape in reversed(shapes):
            model.observe(shape, 1000.0)
            other.predict(shape)  # what was asked before makes no difference
        assert [model.growth(shape, 9) for shape in shapes] == before
        assert [other.growth(shape, 9) for shape in shapes] == before
    assert CostModel(cliffs(is_relative=True), learns=False).rows_within(step(1), 10.2, 1) == 0


# --- prefill rows that fit -----------------------------------------------------------------------


def test_rows_within_a_time() -> None:
    model = CostModel(additive_table())
    decodes = StepShape(2, 2 * 256, 2 * 256, 2, 2)
    rows = model.rows_within(decodes, 60.0, 2048)
    assert 100 < rows < 200
    chunk = [StepShape(2 + n, (2 + n) * 256, 2 * 256, 2, 2) for n in (rows, rows + 1)]
    assert model.predict(chunk[0]) <= 60.0 < model.predict(chunk[1])
    assert model.rows_within(decodes, 60.0, 50) == 50
    assert model.rows_within(decodes, 1.0, 50) == 0
    assert model.rows_within(decodes, 60.0, 0) == 0


# --- speed ---------------------------------------------------------------------------------------


@pytest.mark.timing
def test_it_is_cheap_enough_for_every_step() -> None:
    """A bound that only an accident exceeds: a step has some ten microseconds for each of these."""
    model, shape = CostModel(additive_table()), StepShape(32, 32 * 300, 32 * 300, 32, 32)

    def microseconds(call: Callable[[], object]) -> float:
        samples = []
        for _ in range(50):
            began = time.thread_time()
            call()
            samples.append((time.thread_time() - began) * 1e6)
        return min(samples)

    assert microseconds(lambda: model.observe(shape, 40.0)) < 200
    assert microseconds(lambda: model.growth(shape, 64)) < 200
