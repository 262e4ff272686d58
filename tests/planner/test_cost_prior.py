"""The curve that stands in for a profile: its shape, whose it is, and who says so."""

from __future__ import annotations

import logging
from itertools import pairwise
from statistics import geometric_mean
from typing import Any

import pytest

from paceline import LLM
from paceline.api import llm
from paceline.planner import cost
from paceline.planner.cost import CostModel, prior_table
from paceline.planner.cost_table import CostTable, StepShape
from tests.planner.machine import cost_table

KNOWN = sorted(cost._RATIOS)
UNKNOWN = ("", "reference", "native scalar")
WIDTHS = range(1, 65)


def times(table: CostTable) -> list[float]:
    return [table.milliseconds(width) for width in WIDTHS]


def step(width: int) -> StepShape:
    return StepShape(width, 300 * width, 300, width)


# --- the curve -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [*KNOWN, *UNKNOWN])
def test_wider_steps_take_longer_but_never_as_long_as_narrow_ones_together(ops: str) -> None:
    found = times(prior_table(ops))
    assert found[0] == 1.0, "in plain steps"
    assert all(wide > narrow for narrow, wide in pairwise(found))
    # A row more may cost more than the one before it, but less than a step of its own.
    assert all(wide - narrow < 1.0 for narrow, wide in pairwise(found))


@pytest.mark.parametrize("ops", [*KNOWN, ""])
def test_beyond_the_last_point_every_row_costs_the_same(ops: str) -> None:
    table = prior_table(ops)
    (*_, before, last) = cost._WIDTHS
    slope = (table.milliseconds(last) - table.milliseconds(before)) / (last - before)
    for width in (last + 1, 64, 500):
        expected = table.milliseconds(last) + slope * (width - last)
        assert table.milliseconds(width) == pytest.approx(expected)


@pytest.mark.parametrize("ops", KNOWN)
def test_the_curves_of_known_kernels_are_returned_as_they_are(ops: str) -> None:
    table = prior_table(ops)
    found = [table.milliseconds(width) for width in cost._WIDTHS]
    assert found == pytest.approx(cost._RATIOS[ops])


def test_eight_bit_dot_products_make_wide_steps_cheaper() -> None:
    with_dots, without = times(prior_table("native avx512vnni")), times(prior_table("native avx2"))
    assert all(one < two for one, two in zip(with_dots[7:], without[7:], strict=True))


def test_what_is_unknown_lies_between_what_is_known() -> None:
    known = [times(prior_table(ops)) for ops in KNOWN]
    for ops in UNKNOWN:
        found = times(prior_table(ops))
        for at, time in enumerate(found):
            column = [each[at] for each in known]
            assert min(column) <= time <= max(column)
    table = prior_table("")
    for at, width in enumerate(cost._WIDTHS):
        ratios = [cost._RATIOS[ops][at] for ops in KNOWN]
        assert table.milliseconds(width) == pytest.approx(geometric_mean(ratios))


def test_nothing_but_rows_counts() -> None:
    table = prior_table()
    for shape in (StepShape(8, 8000, 4000, 2, 4), StepShape(8, 0, 0, 8, 1)):
        assert table.step(shape) == table.milliseconds(8)


# --- who takes it --------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [*KNOWN, ""])
def test_a_cost_model_without_a_profile_takes_it(ops: str) -> None:
    model, frozen = CostModel(ops=ops), CostModel(ops=ops, learns=False)
    assert not model.has_profile
    assert model.table.points == prior_table(ops).points
    assert frozen.growth(step(1), 63) == pytest.approx(times(prior_table(ops)))
    # One observation turns plain steps into milliseconds.
    model.observe(step(1), 20.0)
    ratio = prior_table(ops).milliseconds(8)
    assert model.predict(step(8)) == pytest.approx(20.0 * ratio, rel=0.02)


def test_a_profile_takes_its_place() -> None:
    measured = cost_table([1.0, 3.0])
    model = CostModel(measured, ops=KNOWN[0])
    assert model.has_profile
    assert model.table is measured


def test_it_is_corrected_more_freely_than_a_profile() -> None:
    """Both say the same and see the same: a wide step that takes twice as long."""
    assumed = CostModel()
    measured = CostModel(CostTable("measured", prior_table().points, is_relative=True))
    before = assumed.predict(step(8))
    for model in (assumed, measured):
        for _ in range(5):
            model.observe(step(1), 1.0)
            model.observe(step(8), 2 * before)
    assert measured.predict(step(8)) < assumed.predict(step(8)) <= 2 * before * 1.01


REMARK = "no profile of"


@pytest.mark.parametrize(
    ("options", "profile", "is_said"),
    [
        ({}, None, True),
        ({}, cost_table([1.0, 1.1]), False),
        ({"planner": "fixed"}, None, False),
        ({"speculative_config": []}, None, False),
    ],
    ids=["assumed", "measured", "nobody plans", "nobody drafts"],
)
def test_who_plans_by_it_can_know_and_is_not_warned_on_every_run(
    options: dict[str, Any],
    profile: CostTable | None,
    is_said: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llm, "stored_table", lambda *_: profile)
    wish = {"speculative_config": {"method": "prompt_lookup"}, "max_num_seqs": 1, **options}
    with caplog.at_level(logging.INFO, "paceline"), LLM("embedded", **wish):
        said = [r for r in caplog.records if r.message.startswith(REMARK)]
    assert bool(said) == is_said
    assert all("paceline profile" in record.message for record in said)
    assert all(record.levelno == logging.INFO for record in said)
