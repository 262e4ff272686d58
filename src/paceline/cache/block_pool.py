"""KV blocks: which are free, shared or cached, and which a sequence has. Owns no memory.

Block 0 is never handed out: its slot 0 stays zero and stands for "nothing here" in attention.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import pack
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from paceline.models.backend import BLOCK_SIZE, Slots, slots_of


class CachedBlock(NamedTuple):  # made in most steps: a frozen dataclass takes thrice as long
    """A full block whose tokens are known: what the prefix index confirms a match against."""

    block: int
    token_ids: tuple[int, ...]
    parent: bytes


class BlockObserver(Protocol):
    """Gets what the prefix index gains and loses, in that order, on the engine's thread."""

    def stored(
        self, key: bytes, parent: bytes | None, token_ids: Sequence[int], adapter: str | None
    ) -> None:
        """A full block can be found; ``parent`` is None for a sequence's first."""

    def removed(self, key: bytes) -> None:
        """A block's memory was needed."""

    def cleared(self) -> None:
        """No block can be found any more."""


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a block's tokens and of everything before them."""
    return xxhash.xxh3_128_digest(parent + pack(f"<{len(token_ids)}q", *token_ids))


def salt_hash(salt: str) -> bytes:
    """What stands before a sequence's first block; never mistaken for a block's own hash."""
    return b"salt:" + xxhash.xxh3_128_digest(salt.encode("utf-8", "surrogatepass"))


class BlockPool:
    """Hands out blocks, counts their users, and finds blocks by the tokens they hold.

    A block without users whose content is indexed can be found by its content until its memory
    is needed; the least recently used goes first.

    Attributes:
        observer: of the prefix index, or None.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.observer: BlockObserver | None = None
        self._free = list(range(num_blocks - 1, 0, -1))
        self._users = [0] * num_blocks
        self._index: dict[bytes, CachedBlock] = {}
        self._hash_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free ones and cached ones without users."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one user each, or None (and no change) when there are too few."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        key = self._hash_of.pop(block)
        del self._index[key]
        if self.observer is not None:
            self.observer.removed(key)
        return block

    def share(self, block: int) -> None:
        """Add a user to a block."""
        if self._users[block] == 0:
            del self._evictable[block]
        self._users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one user from each block; without users a block is free, or evictable if indexed."""
        for block in reversed(blocks):  # so that a sequence's tail is evicted before its head
            self._users[block] -= 1
            assert self._users[block] >= 0, "a block was released twice"
            if self._users[block] == 0:
                if block in self._hash_of:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def users(self, block: int) -> int:
        return self._users[block]

    def free_blocks(self) -> list[int]:
        """Blocks whose content may be anything."""
        return list(self._free)

    def publish(
        self, block: int, parent: bytes, token_ids: Sequence[int], adapter: str | None = None
    ) -> bytes:
        """Index a full, committed block by content. The first one with a content stays.

        Args:
            adapter: that its tokens were read with, for the observer alone.
        """
        key = chain_hash(parent, token_ids)
        if key not in self._index and block not in self._hash_of:
            self._index[key] = CachedBlock(block, tuple(token_ids), parent)
            self._hash_of[block] = key
            if self.observer is not None:
                is_block = len(parent) == len(key)  # and not what stands before the first one
                self.observer.stored(key, parent if is_block else None, token_ids, adapter)
        return key

    def find(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, bytes] | None:
        """The block that holds these tokens after ``parent``, confirmed token by token."""
        key = chain_hash(parent, token_ids)
        cached = self._index.get(key)
        if cached is None or cached.parent != parent or cached.token_ids != tuple(token_ids):
            return None
        return cached.block, key

    def clear_index(self) -> None:
        """Forget all cached content."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._index.clear()
        self._hash_of.clear()
        if self.observer is not None:
            self.observer.cleared()


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
