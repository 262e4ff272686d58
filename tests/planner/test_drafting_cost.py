"""What drafting costs: learnt apart for calls, levels and catching up; fixed where it must be."""

from __future__ import annotations

import pytest

from paceline.planner.value import DraftingCost, DraftTime


def test_levels_and_calls_are_learnt() -> None:
    cost = DraftingCost()
    for step in range(200):
        levels = 1 + step % 6
        cost.observe("draft", levels, 0, 0.5 * levels, True)
    assert cost.milliseconds("draft", 1) == pytest.approx(0.5, rel=0.05)
    assert cost.milliseconds("draft", 6) == pytest.approx(3.0, rel=0.05)


def test_a_free_proposer_costs_the_same_at_any_depth() -> None:
    cost = DraftingCost()
    for levels in (1, 8, 3, 5, 2):
        cost.observe("lookup", levels, 0, 0.02, False)
    assert cost.milliseconds("lookup", 1) == cost.milliseconds("lookup", 8) == pytest.approx(0.02)


def test_reading_a_prompt_says_nothing_of_levels() -> None:
    cost = DraftingCost()
    cost.observe("draft", 2, 500, 9999.0, True)
    assert cost.catch_up("draft", 500) == 0.0  # the first call says nothing at all
    cost.observe("draft", 2, 500, 101.0, True)
    assert cost.milliseconds("draft", 4) == 0.0
    assert cost.catch_up("draft", 500) == pytest.approx(101.0)
    for _ in range(20):
        cost.observe("draft", 2, 0, 1.0, True)
    assert cost.milliseconds("draft", 2) == pytest.approx(1.0)
    for _ in range(10):
        cost.observe("draft", 2, 100, 11.0, True)
    assert cost.catch_up("draft", 100) == pytest.approx(10.0, rel=0.05)
    assert cost.catch_up("draft", 5) == 0.0  # what a step leaves behind is part of the call


def test_slow_first_calls_are_soon_forgotten_and_a_pause_hardly_counts() -> None:
    cost = DraftingCost()
    cost.observe("draft", 1, 0, 1000.0, True)
    cost.observe("draft", 1, 0, 5.0, True)
    for _ in range(30):
        cost.observe("draft", 1, 0, 1.0, True)
    assert cost.milliseconds("draft", 1) < 1.2
    cost.observe("draft", 1, 0, 1e6, True)
    assert cost.milliseconds("draft", 1) < 1.5


def test_fixed_times_stay() -> None:
    cost = DraftingCost({"draft": DraftTime(1.0, 0.5, 0.1)})
    cost.observe("draft", 1, 0, 77.0, True)
    assert cost.milliseconds("draft", 3) == 2.0
    assert cost.catch_up("draft", 100) == pytest.approx(10.0)
    assert cost.milliseconds("unknown", 3) == 0.0
