"""What states of recurrent layers in arrays and in tensors have in common. Knows no sequences.

Both index alike: the first dimension is layers, the second slots, or lanes of the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StateArrays:
    """A :class:`~paceline.models.backend.StateMemory` but for its making and folding.

    Attributes:
        held: what slots hold.
        logs: what lanes hold of each node.
        due: ``[layers, lanes]``, whether what was accepted of a log is still to be folded.
    """

    held: tuple[Any, ...]
    logs: tuple[Any, ...]
    due: Any

    def clear(self, slot: int) -> None:
        for each in self.held:
            each[:, slot] = 0

    def copy(self, source: int, target: int) -> None:
        for each in self.held:
            each[:, target] = each[:, source]

    def set_due(self, lane: int, due: bool) -> None:
        self.due[:, lane] = due

    def fill(self, slots: Sequence[int], entries: Sequence[tuple[int, int]], value: float) -> None:
        for each in self.held:
            each[:, list(slots)] = value
        lanes, nodes = [lane for lane, _ in entries], [node for _, node in entries]
        for log in self.logs:
            log[:, lanes, nodes] = value
