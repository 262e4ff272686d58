"""The step's time as a function of its rows, learnt online."""

from __future__ import annotations

import pytest

from paceline.policy.cost import StepCost


def test_it_finds_base_and_slope() -> None:
    cost = StepCost()
    for rows in (1, 40, 200, 8, 512, 3):
        cost.observe(rows, 4.0 + 0.5 * rows)
    assert cost.predict(100) == pytest.approx(54.0)
    assert cost.rows_within(54.0, 512) == pytest.approx(100, abs=1)
    assert cost.rows_within(1.0, 512) == 0


def test_it_knows_nothing_at_first() -> None:
    assert StepCost().predict(5) == 0.0
    assert StepCost().rows_within(10.0, 77) == 77


def test_a_long_stretch_of_one_width_keeps_the_slope() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.observe(512, 500.0)
        cost.observe(1, 5.0)
    before = cost.rows_within(100.0, 512)
    for _ in range(2000):
        cost.observe(1, 5.0)
    assert cost.rows_within(100.0, 512) == pytest.approx(before, abs=5)
