"""Which steps are widened: those of which the table says clearly that it makes them cheaper."""

from __future__ import annotations

import pytest

from paceline.policy.cost import CostModel
from paceline.policy.cost_points import CostPoint, StepShape
from paceline.policy.cost_prior import prior_table
from paceline.policy.cost_table import CostTable
from paceline.policy.padding import REACH, Padding, dips, widened
from tests.policy.machine import cost_table

# Of a 32 B model on an M1 Ultra, and on an RTX 5000 Ada, as published for llama.cpp.
M1_ULTRA = [1.0, 1.88, 2.715, 2.112, 2.468, 2.881, 3.531, 3.652, 5.437, 5.447]
RTX_5000 = [1.0, 0.995, 1.004, 1.038, 1.141, 1.32, 1.535, 1.703, 1.202, 1.208]


def decode(rows: int, requests: int = 1) -> StepShape:
    return StepShape(rows, 0, 0, rows, requests)


@pytest.mark.parametrize(
    ("milliseconds", "found"),
    [(M1_ULTRA, {3: 1}), (RTX_5000, {6: 3, 7: 2, 8: 1}), ([1.0, 1.1, 1.2], {}), ([1.0, 0.98], {})],
)
def test_only_clear_dips_are_found(milliseconds: list[float], found: dict[int, int]) -> None:
    assert dips(cost_table(milliseconds)) == found


@pytest.mark.parametrize(("spread", "found"), [(0.05, {2: 1}), (0.2, {})])
def test_what_noise_may_have_made_is_none(spread: float, found: dict[int, int]) -> None:
    times = enumerate([1.0, 2.0, 1.7], start=1)
    points = [CostPoint(1, 0, width, width, ms, spread) for width, ms in times]
    assert dips(CostTable("noisy", points)) == found


def test_neither_guesses_nor_far_widths_nor_single_contexts_count() -> None:
    far = {1: 1.0, 2: 3.0, 3 + REACH: 1.5}
    assert dips(CostTable("far", [CostPoint(1, 0, w, w, ms) for w, ms in far.items()])) == {}
    between = {1: 1.0, 2: 3.0, 6: 1.5}  # what lies between is not measured
    table = CostTable("gaps", [CostPoint(1, 0, w, w, ms) for w, ms in between.items()])
    assert dips(table) == {2: 4}
    points = [CostPoint(1, context, w, w, 1.0) for context in (0, 512) for w in (1, 3)]
    points += [CostPoint(1, 0, 2, 2, 2.0), CostPoint(1, 512, 2, 2, 1.0)]
    assert dips(CostTable("one context", points)) == {}
    assert dips(prior_table()) == {}


def test_what_was_learnt_may_deny_a_dip() -> None:
    cost = CostModel(cost_table(M1_ULTRA))
    padding = Padding(cost)
    assert padding.rows(decode(3)) == 1
    for _ in range(20):
        cost.observe(decode(2), 1.88)
        cost.observe(decode(3), 2.0)
        cost.observe(decode(4), 2.5)
    assert padding.rows(decode(3)) == 0
    assert padding.padded(decode(3)) == decode(3)


def test_growth_is_that_of_padded_steps_where_all_rows_are_sampled() -> None:
    cost = CostModel(cost_table(M1_ULTRA), learns=False)
    padding = Padding(cost)
    assert list(padding.growth(decode(1), 4)) == pytest.approx([1.0, 1.88, 2.112, 2.112, 2.468])
    assert padding.padded(decode(3)) == widened(decode(3), 1) == decode(4)
    mixed = StepShape(3, 0, 0, 1)
    assert padding.padded(mixed) == mixed
    assert list(padding.growth(mixed, 3)) == cost.growth(mixed, 3)


def test_the_rows_are_of_the_mean_context() -> None:
    assert widened(StepShape(3, 500, 300, 3, 2), 2) == StepShape(5, 800, 300, 5, 2)
