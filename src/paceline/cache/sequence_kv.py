"""Which blocks a sequence has, and which slots they are. Owns no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.models.backend import BLOCK_SIZE, Slots, slots_of


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


@dataclass(slots=True)
class SequenceKV:
    """The KV of one sequence.

    Attributes:
        block_table: its blocks in logical order.
        length: committed tokens.
        published: how many leading blocks are in the prefix index (or came out of it).
        hashes: chain hashes of the published blocks, after that of the salt.
        salt: partitions the prefix index.
        adapter: that its tokens are read with; None: the model as it is.
    """

    block_table: list[int] = field(default_factory=list)
    length: int = 0
    published: int = 0
    hashes: list[bytes] = field(default_factory=list)
    salt: str = ""
    adapter: str | None = None

    @property
    def slots(self) -> Slots:
        """The slot of each logical position, as far as the blocks go."""
        return slots_of(self.block_table)

    def slots_at(self, positions: Sequence[int]) -> Slots:
        table = self.block_table
        slots = [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in positions]
        return np.array(slots, dtype=np.int64)

    def shrink(self, num_blocks: int) -> list[int]:
        """Cut the table to ``num_blocks`` and return what was cut off."""
        cut = self.block_table[num_blocks:]
        del self.block_table[num_blocks:]
        return cut
