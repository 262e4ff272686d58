"""Micro-batches: how steps are cut into them, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from paceline.stages.micro_batches import MicroBatch, MicroBatching, cut


def widths(step: Sequence[MicroBatch]) -> list[int]:
    return [sum(last - first for _, first, last in each) for each in step]


@pytest.mark.parametrize(
    ("rows", "limits", "count", "want"),
    [
        ([1] * 8, [1] * 8, 2, [4, 4]),
        ([1] * 5, [0] * 5, 2, [3, 2]),
        ([64], [64], 4, [16, 16, 16, 16]),
        ([64], [63], 4, [16, 16, 16, 16]),  # the last row is sampled, and logged
        ([1, 1, 62], [1, 1, 62], 2, [32, 32]),
        ([9, 1, 1, 1], [0] * 4, 2, [9, 3]),
        ([1, 1, 1, 9], [0] * 4, 2, [3, 9]),
        ([10], [4], 5, [2, 2, 6]),
        ([10], [0], 5, [10]),
    ],
)
def test_micro_batches_are_about_as_wide(
    rows: list[int], limits: list[int], count: int, want: list[int]
) -> None:
    step = cut(rows, limits, count)
    assert widths(step) == want
    pieces = [piece for each in step for piece in each]
    for index, end in enumerate(rows):  # every row once, in order
        own = [(first, last) for span, first, last in pieces if span == index]
        assert [row for piece in own for row in range(*piece)] == list(range(end))
        assert all(first <= limits[index] for first, _ in own)
    for each in step:  # rows of a span that are apart follow one another
        assert len({index for index, _, _ in each}) == len(each)
    assert [index for index, _, _ in pieces] == sorted(index for index, _, _ in pieces)


class Machine:
    """Two stages of some speed, and what is chosen for them."""

    def __init__(self, turn_ms: Callable[[int, bool], float]) -> None:
        self.turn_ms, self.batching = turn_ms, MicroBatching(2, "")

    def step(self, rows: list[int]) -> int:
        """Make one; returns its micro-batches."""
        step = self.batching.choose(rows, rows)
        turn = self.turn_ms(max(widths(step)), len(step) > 1)
        self.batching.observe(step, (1 + len(step)) * turn)
        return len(step)

    def steps(self, rows: list[int], count: int = 400) -> list[int]:
        return [self.step(rows) for _ in range(count)]


def test_what_rows_take_by_themselves_is_cut() -> None:
    machine = Machine(lambda rows, overlaps: 2.0 + rows)
    found = machine.steps([1] * 16)
    assert sum(count > 1 for count in found) > 0.9 * len(found)
    assert machine.step([256]) > 2


def test_weights_that_take_all_the_time_are_read_once() -> None:
    machine = Machine(lambda rows, overlaps: 50.0 + 0.1 * rows)
    found = machine.steps([1] * 8)
    assert sum(count > 1 for count in found) < 0.02 * len(found)


def test_stages_that_share_their_cores_compute_one_after_another() -> None:
    machine = Machine(lambda rows, overlaps: (2.0 + rows) * (1 + overlaps))
    found = machine.steps([1] * 16)
    assert sum(count > 1 for count in found) < 0.02 * len(found)


def test_another_way_is_tried_again() -> None:
    machine = Machine(lambda rows, overlaps: (2.0 + rows) * (1 + overlaps))
    machine.steps([1] * 16)
    machine.turn_ms = lambda rows, overlaps: 2.0 + rows
    found = machine.steps([1] * 16, 2000)[-200:]
    assert sum(count > 1 for count in found) > 0.9 * len(found)


def test_a_single_row_is_not_cut() -> None:
    assert set(Machine(lambda rows, overlaps: 1.0).steps([1])) == {1}
