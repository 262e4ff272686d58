"""The states of recurrent layers: which slots and lanes belong to which sequence. Knows no model.

They are part of the transaction on a sequence that :mod:`paceline.cache.kv_cache` describes. What
a step is certain to commit goes into another slot than the committed state, and what it drafts into
the sequence's lane of the log, so that a step that fails or is rolled back changes neither.

Unlike keys and values, a state is of one position alone: a later sequence with the same tokens can
begin there and nowhere before. Such a :class:`StateCheckpoint` is found by the hash of the full
blocks before it and confirmed by the tokens after those, whose keys and values lie in a block of
their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.models.backend import StateMemory, StateSpan

EMPTY = 0
"""The slot of an empty text, which is never written."""
WITHIN_SHARE = 2
"""One part in this many of what is kept is the most for states within prompts, of which a long one
would keep so many that those at the ends of other texts were gone."""


@dataclass(slots=True)
class SequenceState:
    """The state of one sequence.

    Attributes:
        slot: the state after ``length`` tokens.
        path: entries of its lane that come after those, once a forward has folded them.
        write: where a step that is running puts the state after its ``certain`` rows.
        kept: lengths and slots of states on the way that are kept for later sequences.
        last_kept: length of the latest of these, or of the one that the sequence began with.
    """

    lane: int
    slot: int = EMPTY
    length: int = 0
    path: Sequence[int] = ()
    write: int | None = None
    certain: int = 0
    kept: list[tuple[int, int]] = field(default_factory=list)
    last_kept: int = 0


class States:
    """Slots and lanes for any number of sequences; slot 0 is the state of an empty text."""

    def __init__(self, memory: StateMemory) -> None:
        assert memory.num_slots > 1
        self.memory = memory
        self._free = list(range(memory.num_slots - 1, EMPTY, -1))
        self._users = [0] * memory.num_slots
        self._evict: Callable[[Container[int] | None], bool] = lambda among: False
        self._within = set[int]()
        """Slots of states within prompts that no later text has begun with."""
        self._lanes = list(range(memory.num_lanes - 1, -1, -1))
        self._sequences: dict[int, SequenceState] = {}
        memory.clear(EMPTY)

    @property
    def num_available(self) -> int:
        """Slots without a user."""
        return len(self._free)

    @property
    def has_lane(self) -> bool:
        """Whether another sequence can be opened."""
        return bool(self._lanes)

    def evict_by(self, evict: Callable[[Container[int] | None], bool]) -> None:
        """Say how a slot, of these or any, that is kept for later sequences is given back; False:
        there is none."""
        self._evict = evict

    def has_room(self) -> bool:
        """Whether a slot can be taken; what is kept for later sequences makes way."""
        room = self.memory.num_slots - self.memory.num_lanes
        while not self._free:
            is_crowded = len(self._within) * WITHIN_SHARE > room
            if is_crowded and (self._evict(self._within) or self._drop_kept()):
                continue
            if not self._evict(None) and not self._drop_kept():
                return False
        return True

    def _drop_kept(self) -> bool:
        """Give up a state that a running sequence keeps; False: there is none."""
        for sequence in self._sequences.values():
            if sequence.kept:
                at = least_missed([length for length, _ in sequence.kept])
                self.release(sequence.kept.pop(at)[1])
                return True
        return False

    def _take(self) -> int:
        slot = self._free.pop()
        self._users[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        """Add a user to a slot, which is not written while it has several."""
        if slot != EMPTY:
            self._users[slot] += 1

    def open(self, request_id: int) -> None:
        assert self.has_lane, "more sequences run than there are lanes"
        self._sequences[request_id] = SequenceState(self._lanes.pop())

    def free(self, request_id: int) -> None:
        sequence = self._sequences.pop(request_id)
        self.release(sequence.slot)
        if sequence.write is not None:
            self.release(sequence.write)
        for _, slot in sequence.kept:
            self.release(slot)
        self.memory.set_due(sequence.lane, due=False)
        self._lanes.append(sequence.lane)

    def release(self, slot: int) -> None:
        """Take a user from a slot."""
        if slot != EMPTY:
            self._users[slot] -= 1
            assert self._users[slot] >= 0, "a slot was released twice"
            if not self._users[slot]:
                self._within.discard(slot)
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
        if (certain == 0 or sequence.path) and not self._own(sequence):
            return False
        if certain and sequence.write is None:
            if not self.has_room():
                return False
            self._fold(sequence)
            sequence.write = self._take()
        sequence.certain = certain
        return True

    def _own(self, sequence: SequenceState) -> bool:
        """Let a sequence have its state for itself; False where there is no room."""
        slot = sequence.slot
        if slot != EMPTY and self._users[slot] == 1:
            return True
        if not self.has_room():
            return False
        sequence.slot = self._take()
        self.memory.copy(slot, sequence.slot)
        self.release(slot)
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
            self.release(sequence.slot)
            sequence.slot, sequence.write = sequence.write, None
        sequence.path = [node - sequence.certain for node in path[sequence.certain :]]
        sequence.certain = 0
        self.memory.set_due(sequence.lane, due=bool(sequence.path))

    def rollback(self, request_id: int) -> None:
        sequence = self._sequences[request_id]
        if sequence.write is not None:
            self.release(sequence.write)
            sequence.write = None
        sequence.certain = 0

    # --- copies --------------------------------------------------------------------------------

    def has(self, request_id: int, length: int) -> bool:
        """Whether the state after the first ``length`` tokens of a sequence is still there."""
        return self._sequences[request_id].length == length

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let an empty sequence begin with another one's slot; there must be a free one."""
        parent, child = self._sequences[parent_id], self._sequences[child_id]
        child.slot, child.length = self._take(), parent.length
        self.memory.copy(parent.slot, child.slot)

    def begin(self, request_id: int, slot: int, length: int) -> None:
        """Let an empty sequence begin with a slot that others keep."""
        sequence = self._sequences[request_id]
        assert sequence.slot == EMPTY
        self._within.discard(slot)
        self.share(slot)
        sequence.slot, sequence.length, sequence.last_kept = slot, length, length

    def keep(self, request_id: int, distance: int, within: bool = False) -> None:
        """Keep a sequence's state for later ones, once its text is published, where so many tokens
        lie between it and the one that was kept before.

        Args:
            within: it is one within a prompt.
        """
        s = self._sequences[request_id]
        if not within and s.kept and s.kept[-1][0] == s.length:
            self._within.discard(s.kept[-1][1])  # what was on the way turns out to be an end
        if s.slot != EMPTY and s.length - s.last_kept >= distance:
            if within:
                self._within.add(s.slot)
            self.share(s.slot)
            s.kept.append((s.length, s.slot))
            s.last_kept = s.length

    def keep_end(self, request_id: int) -> None:
        """Keep the state after all tokens of a sequence, to which nothing more will come."""
        sequence = self._sequences[request_id]
        if self._own(sequence):
            self._fold(sequence)
            self.keep(request_id, 1)

    def take_kept(self, request_id: int) -> list[tuple[int, int]]:
        """What a sequence has kept: lengths and slots, which are the caller's from here on."""
        sequence = self._sequences[request_id]
        kept, sequence.kept = sequence.kept, []
        return kept

    def poison_free(self, value: float) -> None:
        """Overwrite what must not be read: free slots, and entries of logs that are not due."""
        due = {(s.lane, entry) for s in self._sequences.values() for entry in s.path}
        lanes, nodes = range(self.memory.num_lanes), range(self.memory.num_nodes)
        entries = [(lane, node) for lane in lanes for node in nodes if (lane, node) not in due]
        self.memory.fill(self._free, entries, value)


def least_missed(lengths: Sequence[int]) -> int:
    """Which of some ascending lengths lies in the smallest gap between its neighbours; the last one
    only where it is the only one."""
    gaps = [b - a for a, b in zip([0, *lengths], lengths[1:], strict=False)]
    return gaps.index(min(gaps)) if gaps else 0


class StateCheckpoint(NamedTuple):
    """A state after some text.

    Attributes:
        key: hash of the text's full blocks.
        tail: tokens after those.
        slot: of the state.
        block: where the tail's keys and values are; None where there is no tail.
    """

    key: bytes
    tail: tuple[int, ...]
    slot: int
    block: int | None


class Checkpoints:
    """All checkpoints of a cache, the least recently used first."""

    def __init__(self) -> None:
        self._kept: dict[bytes, dict[tuple[int, ...], StateCheckpoint]] = {}
        self._order: dict[tuple[bytes, tuple[int, ...]], None] = {}

    def __len__(self) -> int:
        return len(self._order)

    def blocks(self) -> Counter[int]:
        """Blocks that are kept for tails, and for how many of them each."""
        kept = (self._kept[key][tail].block for key, tail in self._order if tail)
        return Counter(block for block in kept if block is not None)

    def has(self, key: bytes, tail: tuple[int, ...]) -> bool:
        return (key, tail) in self._order

    def add(self, checkpoint: StateCheckpoint) -> None:
        place = checkpoint.key, checkpoint.tail
        assert place not in self._order
        self._kept.setdefault(checkpoint.key, {})[checkpoint.tail] = checkpoint
        self._order[place] = None

    def find(self, key: bytes, token_ids: Sequence[int]) -> StateCheckpoint | None:
        """The one after most of the tokens that follow some full blocks."""
        found = self._kept.get(key, {})
        fitting = [tail for tail in found if tuple(token_ids[: len(tail)]) == tail]
        return found[max(fitting, key=len)] if fitting else None

    def use(self, checkpoint: StateCheckpoint) -> None:
        """Make it the most recently used."""
        place = checkpoint.key, checkpoint.tail
        del self._order[place]
        self._order[place] = None

    def pop(self, among: Container[int] | None = None) -> StateCheckpoint | None:
        """Forget the least recently used one, of those with some slots; None where there is none.

        Args:
            among: these slots; None: all.
        """
        places = (p for p in self._order if among is None or self._kept[p[0]][p[1]].slot in among)
        place = next(places, None)
        if place is None:
            return None
        key, tail = place
        del self._order[place]
        found = self._kept[key].pop(tail)
        if not self._kept[key]:
            del self._kept[key]
        return found
