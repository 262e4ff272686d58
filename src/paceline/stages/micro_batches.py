"""Into which micro-batches a step is cut, that go through the stages one behind the other.

While one stage computes a micro-batch, the stage before it computes the next one: a step takes
``stages - 1 + micro-batches`` turns, each as long as a stage needs for the widest of them, where a
whole step takes ``stages`` turns of all rows. Each micro-batch reads the weights again, so only
measured times tell whether that pays. What a turn takes is learnt of whole steps and of overlapped
ones separately, because stages that share cores are slower side by side.

Owns the cut and the choice; knows neither stages nor models.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.planner.cost import CostModel
from paceline.planner.cost_table import StepShape
from paceline.planner.value import Exploration

MicroBatch = list[tuple[int, int, int]]
"""Of each span that it has rows of: the span's index, its first row here, and where they end."""
PER_STAGE = 1, 2, 4
"""Micro-batches that are considered, for each stage: the wider a step, the more of them pay."""
OTHER = "the other way"


def cut(rows: Sequence[int], limits: Sequence[int], count: int) -> list[MicroBatch]:
    """Cut a step into at most so many micro-batches, about equally wide.

    Args:
        rows: of each span.
        limits: of each span, the last row before which it may be cut.
        count: at most as many as there are rows.
    """
    found: list[MicroBatch] = []
    left, room = sum(rows), 0  # rows of the step, and what the latest micro-batch has to take yet
    for index, (end, limit) in enumerate(zip(rows, limits, strict=True)):
        first = 0
        while first < end:
            last = min(end, first + room)
            if last > limit:
                last = end if first >= limit or end - first <= 2 * room else limit
            if room <= 0 or (found[-1] and last - first > 2 * room):
                room = -(-left // (count - len(found)))
                found.append([])
                continue
            found[-1].append((index, first, last))
            left -= last - first
            room = room - (last - first) if last == end else 0  # the rest comes behind it
            first = last
    return found


class MicroBatching:
    """Chooses how a step is cut, and learns from how long it took.

    Args:
        stages: the engine's own included.
        ops: name of the operations that compute, on which depends what is assumed at first.

    Attributes:
        counts: numbers of micro-batches that are considered beside whole steps.
    """

    def __init__(self, stages: int, ops: str) -> None:
        self.counts: Sequence[int] = [stages * each for each in PER_STAGE]
        self._stages = stages
        self._turns = {False: CostModel(ops=ops), True: CostModel(ops=ops)}  # overlapped or not
        self._seen = set[bool]()
        self._exploration, self._explores_ms = Exploration(), 0.0

    def choose(self, rows: Sequence[int], limits: Sequence[int]) -> list[MicroBatch]:
        """The micro-batches of a step, a single one of a whole step; see :func:`cut`."""
        whole = [[(index, 0, count) for index, count in enumerate(rows)]]
        is_known = False in self._seen  # what overlapping has to be better than
        counts = [count for count in self.counts if is_known and count <= sum(rows)]
        ways = [whole, *(cut(rows, limits, count) for count in counts)]
        times = [self._predict(way) for way in ways]
        best = min(range(len(ways)), key=times.__getitem__)
        others = [i for i, way in enumerate(ways) if (len(way) > 1) != (len(ways[best]) > 1)]
        self._explores_ms = 0.0
        if others:
            other = min(others, key=times.__getitem__)
            cost_ms = times[other] - times[best]
            if self._exploration.covers(OTHER, cost_ms):
                best, self._explores_ms = other, cost_ms
        return ways[best]

    def observe(self, step: Sequence[MicroBatch], milliseconds: float) -> None:
        """Learn from how long a step that was cut like this took."""
        shape, turns = self._shape(step)
        overlaps = len(step) > 1
        self._turns[overlaps].observe(shape, milliseconds / turns)
        self._seen.add(overlaps)
        self._exploration.passed(milliseconds)
        if self._explores_ms:
            self._exploration.spend(OTHER, self._explores_ms)

    def _predict(self, step: Sequence[MicroBatch]) -> float:
        shape, turns = self._shape(step)
        overlaps = len(step) > 1
        known = overlaps if overlaps in self._seen else not overlaps
        return turns * self._turns[known].predict(shape)

    def _shape(self, step: Sequence[MicroBatch]) -> tuple[StepShape, int]:
        """What a stage computes in a turn, and the turns."""
        widest = max(sum(last - first for _, first, last in each) for each in step)
        return StepShape(widest, 0.0, 0.0, widest), self._stages - 1 + len(step)
