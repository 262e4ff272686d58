"""How micro-batches go through stages, and what is left in the line when one fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import StageError
from paceline.stages.link import Journey
from paceline.tensors.arrays import Floats

PATIENCE = 20.0


class Stage:
    """Adds one to every row, and answers none before it has more micro-batches than so many."""

    def __init__(self, patience: int = 0, fails: int = -1) -> None:
        self.told, self.answered, self._fails = list[Any](), 0, fails
        self._enough, self._patience = threading.Event(), patience

    def start(self, x: Floats, index: int, taps: Sequence[int], greedy: bool) -> None:
        self.told.append((index, x + 1))
        if len(self.told) > self._patience:
            self._enough.set()

    def result(self) -> Any:
        assert self._enough.wait(PATIENCE)
        index, x = self.told[self.answered]
        self.answered += 1
        if index == self._fails:
            raise StageError("it failed")
        return {}, [x[:, 0], x[:, None]]


def rows_of(count: int) -> Iterator[Floats]:
    for index in range(count):
        yield np.full((2, 3), index, np.float32)


def test_micro_batches_are_under_way_together() -> None:
    one, two = Stage(patience=1), Stage(patience=1)
    journey = Journey([one, two], [(), ()], False)  # type: ignore[list-item]
    journey.run(rows_of(3), overlaps=True)
    said = [arrays[0].tolist() for _, arrays in journey.answers[1]]
    assert said == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_all_that_was_started_is_heard_before_a_step_fails(fails: int) -> None:
    one, two = Stage(patience=1, fails=fails), Stage()
    with pytest.raises(StageError, match="it failed"):
        Journey([one, two], [(), ()], False).run(rows_of(3), True)  # type: ignore[list-item]
    assert one.answered == len(one.told)
    assert two.answered == len(two.told) <= fails


def test_rows_that_fail_leave_nothing_in_the_line() -> None:
    def failing() -> Iterator[Floats]:
        yield from rows_of(2)
        raise ValueError("no row")

    stage = Stage()
    with pytest.raises(ValueError, match="no row"):
        Journey([stage], [()], False).run(failing(), True)  # type: ignore[list-item]
    assert stage.answered == len(stage.told) == 2
