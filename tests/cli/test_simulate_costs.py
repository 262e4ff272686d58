"""What ``paceline simulate`` remarks on a cost table: where it knows nothing, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.config import EngineConfig
from paceline.planner.cost import prior_table
from paceline.planner.cost_table import CostPoint, CostTable
from paceline.profiling.profile_steps import WIDTHS
from paceline_lab.simulate.setup import cost_notes
from paceline_lab.simulate.simulator import Simulator
from tests.lab.test_simulate import META, simulator
from tests.lab.toy_traces import make_trace


def notes(
    table: CostTable,
    *,
    length: int = 20,
    concurrency: int = 1,
    drafts: dict[str, CostTable] | None = None,
) -> list[str]:
    trace = make_trace(0, [1], [2] * (length - 1))
    config = EngineConfig(max_num_seqs=concurrency)
    found = simulator().drafts
    return cost_notes(Simulator([trace], META, table, drafts or {}, found, config))


def table_of(
    widths: Sequence[int], contexts: Sequence[int] = (64,), requests: Sequence[int] = (1,)
) -> CostTable:
    return CostTable(
        "by hand",
        [
            CostPoint(each, context, width, width, 1.0 + each * width / 10)
            for width in widths
            for context in contexts
            for each in requests
        ],
    )


def test_far_points_are_named() -> None:
    (note,) = notes(table_of((1, 5, 32)))
    assert note.startswith("by hand: ")
    assert note.endswith("1 and 5, 5 and 32")


@pytest.mark.parametrize("widths", [WIDTHS, (1, 2, 4, 8, 16, 32), (1, 2, 3, 6, 12, 24, 48, 512)])
def test_what_is_measured_as_densely_as_costs_bend_has_no_note(widths: Sequence[int]) -> None:
    assert notes(table_of(widths)) == []


def test_gaps_of_any_context_are_named() -> None:
    whole, gappy = table_of(range(1, 34), (64,)), table_of((1, 2, 9, 33), (512,))
    (note,) = notes(CostTable("by hand", [*whole.points, *gappy.points]))
    assert note.endswith("2 and 9, 9 and 33")


def test_what_lies_beyond_the_table_is_named() -> None:
    (note,) = notes(table_of(range(1, 10)))
    assert "nothing wider than 9 rows" in note
    (note,) = notes(table_of(WIDTHS), length=129)
    assert "the longest context measured is 64, that of the traces 129" in note
    assert notes(table_of(WIDTHS), length=128) == []


def test_several_requests_that_nobody_measured_are_named() -> None:
    (note,) = notes(table_of(WIDTHS), concurrency=2)
    assert "no step of several requests was measured" in note
    assert notes(table_of(WIDTHS, requests=(1, 4)), concurrency=2) == []


def test_gaps_of_a_draft_model_are_named_and_an_assumed_table_is_left_alone() -> None:
    draft = CostTable("small", [CostPoint(1, 0, 1, 1, 0.1), CostPoint(1, 0, 9, 9, 0.3)], True)
    (note,) = notes(prior_table(), length=400, concurrency=4, drafts={"toy": draft})
    assert note.startswith("small: ")
    assert note.endswith("1 and 9")
