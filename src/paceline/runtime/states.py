"""The states of recurrent layers: which slots and lanes belong to which sequence. Knows no model.

They are part of the transaction on a sequence that :mod:`paceline.runtime.kv_cache` describes. What
a step is certain to commit goes into another slot than the committed state, and what it drafts into
the sequence's lane of the log, so that a step that fails or is rolled back changes neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.models.ops.base import StateMemory, StateSpan

EMPTY = 0
"""The slot of an empty text, which is never written."""


@dataclass(slots=True)
class SequenceState:
    """The state of one sequence.

    Attributes:
        slot: the state after ``length`` tokens.
        path: entries of its lane that come after those, once a forward has folded them.
        write: where a step that is running puts the state after its ``certain`` rows.
    """

    lane: int
    slot: int = EMPTY
    length: int = 0
    path: Sequence[int] = ()
    write: int | None = None
    certain: int = 0


class States:
    """Slots and lanes for any number of sequences.

    Args:
        memory: the backend's; slot 0 is that of an empty text.
    """

    def __init__(self, memory: StateMemory) -> None:
        assert memory.num_slots > 1
        self.memory = memory
        self._free = list(range(memory.num_slots - 1, EMPTY, -1))
        self._lanes = list(range(memory.num_lanes - 1, -1, -1))
        self._sequences: dict[int, SequenceState] = {}
        memory.clear(EMPTY)

    @property
    def num_available(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def open(self, request_id: int) -> None:
        assert self._lanes, "more sequences run than there are lanes"
        self._sequences[request_id] = SequenceState(self._lanes.pop())

    def free(self, request_id: int) -> None:
        sequence = self._sequences.pop(request_id)
        self._release(sequence.slot)
        if sequence.write is not None:
            self._release(sequence.write)
        self.memory.set_due(sequence.lane, due=False)
        self._lanes.append(sequence.lane)

    def _release(self, slot: int) -> None:
        if slot != EMPTY:
            self._free.append(slot)

    # --- one step ------------------------------------------------------------------------------

    def reserve(self, request_id: int, num_nodes: int, certain: int) -> bool:
        """Make room for a span; False, and no change, when there is none.

        Args:
            certain: leading nodes of a chain, which will be committed whatever is sampled.
        """
        sequence = self._sequences[request_id]
        if num_nodes - certain > self.memory.num_nodes:
            return False
        needed = (sequence.write is None) if certain else (sequence.slot == EMPTY)
        if needed and not self._free:
            return False
        if certain:
            self._fold(sequence)
            sequence.write = self._free.pop() if sequence.write is None else sequence.write
        elif sequence.slot == EMPTY:
            sequence.slot = self._free.pop()
            self.memory.clear(sequence.slot)
        sequence.certain = certain
        return True

    def _fold(self, sequence: SequenceState) -> None:
        if sequence.path:
            self.memory.fold(sequence.slot, sequence.lane, sequence.path)
            sequence.length += len(sequence.path)
            sequence.path = ()

    def spans(self, request_ids: Iterable[int]) -> list[StateSpan]:
        """Where the reserved spans of some sequences begin, and what they keep."""
        found = []
        for request_id in request_ids:
            s = self._sequences[request_id]
            write = s.slot if s.write is None else s.write
            found.append(StateSpan(s.slot, write, s.lane, s.path, s.certain))
        return found

    def commit(self, request_id: int, path: Sequence[int]) -> None:
        """Keep the nodes ``path`` of the span; the certain ones are the first of them."""
        sequence = self._sequences[request_id]
        # A forward has folded what was due before.
        sequence.length += len(sequence.path) + sequence.certain
        if sequence.write is not None:
            self._release(sequence.slot)
            sequence.slot, sequence.write = sequence.write, None
        sequence.path = [node - sequence.certain for node in path[sequence.certain :]]
        sequence.certain = 0
        self.memory.set_due(sequence.lane, due=bool(sequence.path))

    def rollback(self, request_id: int) -> None:
        sequence = self._sequences[request_id]
        if sequence.write is not None:
            self._release(sequence.write)
            sequence.write = None
        sequence.certain = 0

    # --- copies --------------------------------------------------------------------------------

    def has(self, request_id: int, length: int) -> bool:
        """Whether the state after the first ``length`` tokens of a sequence is still there."""
        return self._sequences[request_id].length == length

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let an empty sequence begin with another one's slot; there must be a free one."""
        parent, child = self._sequences[parent_id], self._sequences[child_id]
        child.slot, child.length = self._free.pop(), parent.length
        self.memory.copy(parent.slot, child.slot)

    def poison_free(self, value: float) -> None:
        """Overwrite what nobody may read: free slots, and what of the logs is not due."""
        due = {(s.lane, entry) for s in self._sequences.values() for entry in s.path}
        lanes, nodes = range(self.memory.num_lanes), range(self.memory.num_nodes)
        entries = [(lane, node) for lane in lanes for node in nodes if (lane, node) not in due]
        self.memory.fill(self._free, entries, value)
