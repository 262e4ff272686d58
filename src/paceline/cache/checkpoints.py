"""States of recurrent layers that later sequences may begin with. Owns the index, no memory.

Unlike keys and values, a state is of one position alone: a sequence with the same tokens can begin
there and nowhere before. A checkpoint is found by the hash of the full blocks before it and
confirmed by the tokens after those, whose keys and values lie in a block of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import NamedTuple


class Checkpoint(NamedTuple):
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
        self._kept: dict[bytes, dict[tuple[int, ...], Checkpoint]] = {}
        self._order: dict[tuple[bytes, tuple[int, ...]], None] = {}

    def __len__(self) -> int:
        return len(self._order)

    def blocks(self) -> Counter[int]:
        """Blocks that are kept for tails, and for how many of them each."""
        kept = (self._kept[key][tail].block for key, tail in self._order if tail)
        return Counter(block for block in kept if block is not None)

    def has(self, key: bytes, tail: tuple[int, ...]) -> bool:
        return (key, tail) in self._order

    def add(self, checkpoint: Checkpoint) -> None:
        place = checkpoint.key, checkpoint.tail
        assert place not in self._order
        self._kept.setdefault(checkpoint.key, {})[checkpoint.tail] = checkpoint
        self._order[place] = None

    def find(self, key: bytes, token_ids: Sequence[int]) -> Checkpoint | None:
        """The one after most of the tokens that follow some full blocks."""
        found = self._kept.get(key, {})
        fitting = [tail for tail in found if tuple(token_ids[: len(tail)]) == tail]
        return found[max(fitting, key=len)] if fitting else None

    def use(self, checkpoint: Checkpoint) -> None:
        """Make it the most recently used."""
        place = checkpoint.key, checkpoint.tail
        del self._order[place]
        self._order[place] = None

    def pop(self, among: Container[int] | None = None) -> Checkpoint | None:
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
