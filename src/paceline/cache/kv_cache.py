"""The paged KV cache: memory, and per sequence which slots hold what. Knows no sampling, no policy.

A step is a transaction on a sequence: :meth:`KVCache.reserve` slots for a span, write them in the
forward, then either :meth:`KVCache.commit` the accepted path, which becomes contiguous, or
:meth:`KVCache.rollback`. Only committed full blocks are ever shared or published.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from weakref import WeakSet

import numpy as np

from paceline.cache.block_pool import BlockPool, SequenceKV, blocks_for, salt_hash
from paceline.cache.states import Checkpoints, StateCheckpoint, States
from paceline.core.errors import ConfigError
from paceline.models.backend import BLOCK_SIZE, KVMemory, SlotMemory, Slots, slots_of

CHECKPOINT_DISTANCE = 32 * BLOCK_SIZE
"""Tokens of a prompt between states that are kept for later sequences."""


class KVCache:
    """Paged keys and values of one model for any number of sequences.

    Args:
        memory: the backend's, with the reserved block 0; what is read back from it is what
            attention sees.
        prefix_caching: whether committed blocks may serve later sequences.
        states: of a model's recurrent layers, where it has some; the sequences are the same.

    Raises:
        ConfigError: the memory holds fewer than two blocks.
    """

    block_size = BLOCK_SIZE

    def __init__(
        self, memory: KVMemory, prefix_caching: bool = True, states: States | None = None
    ) -> None:
        if memory.num_blocks < 2:
            raise ConfigError(
                f"the KV cache has room for {memory.num_blocks} blocks of {BLOCK_SIZE} tokens; at "
                "least 2 are needed: raise --kv-cache-memory"
            )
        self.memory = memory
        self.pool = BlockPool(memory.num_blocks)
        self.prefix_caching = prefix_caching
        self.states = states
        self.checkpoints = Checkpoints()
        if states is not None:
            states.evict_by(self._evict)
        self._sequences: dict[int, SequenceKV] = {}
        self._followers: WeakSet[SlotMemory] = WeakSet()

    def follow(self, memory: SlotMemory) -> None:
        """Let something else that lies by slots go where keys and values go, until it is dropped.

        It finds what belongs to a token in the slot that the token has here, through forks, moves
        and prefix hits alike.
        """
        self._followers.add(memory)

    def _move(self, source: Slots, target: Slots) -> None:
        for memory in (self.memory, *self._followers):
            memory.move(source, target)

    # --- sequences -----------------------------------------------------------------------------

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._sequences

    def __getitem__(self, request_id: int) -> SequenceKV:
        return self._sequences[request_id]

    @property
    def can_open(self) -> bool:
        """Whether another sequence can be opened: states have room for a fixed number."""
        return self.states is None or self.states.has_lane

    @property
    def num_available(self) -> int:
        """Blocks that sequences can get; tails of checkpoints make way."""
        return self.pool.num_available + len(self._only_kept())

    @property
    def num_used(self) -> int:
        return self.pool.num_blocks - 1 - self.num_available

    def _only_kept(self) -> set[int]:
        """Blocks that nothing but checkpoints uses."""
        kept = self.checkpoints.blocks()
        return {block for block, count in kept.items() if self.pool.users(block) == count}

    def open(self, request_id: int, salt: str = "", adapter: str | None = None) -> SequenceKV:
        """Start an empty sequence.

        Args:
            salt: sequences of different salts share nothing.
            adapter: that its tokens are read with, for observers of the prefix index.
        """
        assert request_id not in self._sequences, "the sequence is open already"
        sequence = SequenceKV(salt=salt, hashes=[salt_hash(salt)], adapter=adapter)
        self._sequences[request_id] = sequence
        if self.states is not None:
            self.states.open(request_id)
        return sequence

    def free(self, request_id: int) -> None:
        """Give back everything a sequence holds. Unknown sequences are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.pool.release(sequence.block_table)
            if self.states is not None:
                self.states.free(request_id)

    def _found(self, salt: str, token_ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Cached blocks that a sequence of these tokens begins with, and their hashes."""
        key = salt_hash(salt)
        for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
            found = self.pool.find(key, token_ids[end - BLOCK_SIZE : end])
            if found is None:
                return
            yield found
            _, key = found

    def blocks_held(self, token_ids: Sequence[int], salt: str = "") -> int:
        """How many blocks a sequence of these tokens would share that are in use anyway."""
        found = [*self._found(salt, token_ids)] if self.prefix_caching else []
        while self.states is not None and found:
            rest = token_ids[len(found) * BLOCK_SIZE :][: BLOCK_SIZE - 1]
            if self.checkpoints.find(found[-1][1], rest) is not None:
                break
            found.pop()
        only_kept = self._only_kept()
        return sum(self.pool.users(b) > 0 and b not in only_kept for b, _ in found)

    def attach_prefix(self, request_id: int, token_ids: Sequence[int], limit: int) -> int:
        """Let a sequence that is still empty start with cached blocks.

        Args:
            token_ids: the tokens whose KV is wanted.
            limit: most tokens that may come from the cache.

        Returns:
            How many leading tokens have their KV, and the states after them, already.
        """
        sequence = self._sequences[request_id]
        if not self.prefix_caching or sequence.length:
            return sequence.length
        for block, key in self._found(sequence.salt, token_ids[:limit]):
            self.pool.share(block)
            sequence.hashes.append(key)
            sequence.block_table.append(block)
            sequence.published += 1
        sequence.length = sequence.published * BLOCK_SIZE
        if self.states is not None:
            self._go_back(request_id, self.states, token_ids[:limit])
        return sequence.length

    def _go_back(self, request_id: int, states: States, token_ids: Sequence[int]) -> None:
        """Cut what was found for a sequence to the last position of which there is a state."""
        sequence, found = self._sequences[request_id], None
        while found is None and sequence.hashes:
            full = len(sequence.hashes) - 1
            tail = token_ids[full * BLOCK_SIZE : (full + 1) * BLOCK_SIZE - 1]
            found = self.checkpoints.find(sequence.hashes[-1], tail)
            if found is not None and found.block is not None and not self.pool.num_available:
                found = None  # no room for a copy of its tail
            if found is None:
                sequence.hashes.pop()
        sequence.hashes = sequence.hashes or [salt_hash(sequence.salt)]
        sequence.published = len(sequence.hashes) - 1
        sequence.length = sequence.published * BLOCK_SIZE
        self._cut(sequence, sequence.length)
        if found is None:
            return
        self.checkpoints.use(found)
        if found.block is not None:
            sequence.block_table += self.pool.allocate(1) or []
            count = len(found.tail)
            source = np.arange(count) + found.block * BLOCK_SIZE
            self._move(source, sequence.slots_at(range(sequence.length, sequence.length + count)))
            sequence.length += count
        states.begin(request_id, found.slot, sequence.length)

    def can_fork(self, parent_id: int, length: int) -> bool:
        """Whether another sequence could start with so many of a sequence's committed tokens, if
        there were room. States of recurrent layers do not go back."""
        return self.states is None or self.states.has(parent_id, length)

    def fork(self, parent_id: int, child_id: int, length: int) -> bool:
        """Start ``child_id`` with the first ``length`` committed tokens of another sequence.

        Full blocks are shared, a partial one is copied. False (and no change) without room.
        """
        parent = self._sequences[parent_id]
        assert length <= parent.length, "a fork may only take committed tokens"
        if self.states is not None and not self.states.has_room():
            return False
        full, rest = divmod(length, BLOCK_SIZE)
        tail = self.pool.allocate(1) if rest else []
        if tail is None:
            return False
        child = self.open(child_id, parent.salt, parent.adapter)
        for block in parent.block_table[:full]:
            self.pool.share(block)
        child.block_table = parent.block_table[:full] + tail
        if rest:
            copied = range(full * BLOCK_SIZE, length)
            self._move(parent.slots_at(copied), child.slots_at(copied))
        child.length = length
        if self.states is not None:
            self.states.fork(parent_id, child_id)
        return True

    def block_tables(self, request_ids: Iterable[int]) -> list[list[int]]:
        """The tables themselves, of several sequences."""
        sequences, tables = self._sequences, []
        for request_id in request_ids:
            tables.append(sequences[request_id].block_table)
        return tables

    # --- one step ------------------------------------------------------------------------------

    def blocks_missing(self, request_id: int, num_nodes: int) -> int:
        """How many blocks a reservation of ``num_nodes`` would have to allocate."""
        sequence = self._sequences[request_id]
        return max(0, blocks_for(sequence.length + num_nodes) - len(sequence.block_table))

    def reserve(self, request_id: int, num_nodes: int, certain: int = 0) -> bool:
        """Make room for ``num_nodes`` after the committed tokens; False when there is none.

        Args:
            certain: leading nodes of a chain, which will be committed whatever is sampled.
        """
        states, sequence = self.states, self._sequences[request_id]
        missing = -(-(sequence.length + num_nodes) // BLOCK_SIZE) - len(sequence.block_table)
        blocks = self._allocate(missing) if missing > 0 else []
        if blocks is None:
            return False
        if states is not None and not states.reserve(request_id, num_nodes, certain):
            self.pool.release(blocks)
            return False
        sequence.block_table += blocks
        return True

    def _allocate(self, count: int) -> list[int] | None:
        """Blocks for a sequence; tails of checkpoints make way. None where there are too few."""
        blocks = self.pool.allocate(count)
        while blocks is None and self.checkpoints.blocks():
            self._evict()
            blocks = self.pool.allocate(count)
        return blocks

    def commit(self, request_id: int, path: Sequence[int]) -> None:
        """Make the KV of the nodes ``path`` (ascending, node 0 first) the next committed tokens.

        Blocks that only rejected nodes had used are given back.
        """
        sequence, count = self._sequences[request_id], len(path)
        start = sequence.length
        if path[-1] != count - 1:  # the path is not the leading nodes: close the gaps
            kept = next(at for at, node in enumerate(path) if at != node)
            source = sequence.slots_at([start + node for node in path[kept:]])
            self._move(source, sequence.slots_at(range(start + kept, start + count)))
        sequence.length = start + count
        if self.states is not None:
            self.states.commit(request_id, path)
            if self.prefix_caching and len(path) > 1:
                self.states.keep(request_id, CHECKPOINT_DISTANCE, within=True)
        if sequence.length <= (len(sequence.block_table) - 1) * BLOCK_SIZE:
            self._cut(sequence, sequence.length)

    def rollback(self, request_id: int, kept: int = 0) -> None:
        """Drop every reservation beyond the committed tokens and ``kept`` nodes."""
        sequence = self._sequences[request_id]
        if self.states is not None:
            self.states.rollback(request_id)
        self._cut(sequence, sequence.length + kept)

    def _cut(self, sequence: SequenceKV, tokens: int) -> None:
        """Give back the blocks beyond the first ``tokens``."""
        needed = blocks_for(tokens)
        if len(sequence.block_table) > needed:
            self.pool.release(sequence.shrink(needed))

    def truncate(self, request_id: int, length: int) -> None:
        """Forget committed tokens from ``length`` on; not where blocks are published or shared."""
        sequence = self._sequences[request_id]
        kept = sequence.block_table[: blocks_for(length)]
        assert sequence.published == 0, "published blocks cannot be cut"
        assert self.states is None, "states of recurrent layers do not go back"
        assert not kept or self.pool.users(kept[-1]) == 1, "shared blocks cannot be cut"
        sequence.length = min(sequence.length, length)
        self.rollback(request_id)

    def publish(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Index the full committed blocks of a sequence for later ones."""
        sequence = self._sequences[request_id]
        if not self.prefix_caching:
            return
        while (end := (sequence.published + 1) * BLOCK_SIZE) <= sequence.length:
            block = sequence.block_table[sequence.published]
            tokens = token_ids[end - BLOCK_SIZE : end]
            key = self.pool.publish(block, sequence.hashes[-1], tokens, sequence.adapter)
            sequence.hashes.append(key)
            sequence.published += 1
        if self.states is not None:
            self._publish_states(request_id, self.states, token_ids)

    def _publish_states(self, request_id: int, states: States, token_ids: Sequence[int]) -> None:
        """Index the states that a sequence has kept."""
        sequence = self._sequences[request_id]
        for length, slot in states.take_kept(request_id):
            full = length // BLOCK_SIZE
            key, tail = sequence.hashes[full], tuple(token_ids[full * BLOCK_SIZE : length])
            if self.checkpoints.has(key, tail):
                states.release(slot)
                continue
            block = sequence.block_table[full] if tail else None
            if block is not None:
                self.pool.share(block)
            self.checkpoints.add(StateCheckpoint(key, tail, slot, block))

    def publish_prompt(self, request_id: int) -> None:
        """Keep the state after a prompt's certain tokens for the next :meth:`publish`."""
        if self.states is not None and self.prefix_caching:
            self.states.keep(request_id, 1)

    def publish_end(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Index the states at the end of a sequence that is about to be freed."""
        if self.states is not None and self.prefix_caching and request_id in self:
            self.states.keep_end(request_id)
            self.publish(request_id, token_ids)

    def _evict(self, among: Container[int] | None = None) -> bool:
        """Forget the checkpoint that was used least recently; False: there is none."""
        found = self.checkpoints.pop(among)
        if found is None or self.states is None:
            return False
        self.states.release(found.slot)
        if found.block is not None:
            self.pool.release([found.block])
        return True

    def lose(self) -> set[int]:
        """Forget what others could begin with, since a part of the memory is gone.

        Returns:
            The sequences that had something there, of which nothing can be read any more.
        """
        self.flush_prefixes()
        return {number for number, each in self._sequences.items() if each.length}

    def flush_prefixes(self) -> None:
        """Forget all published blocks and states; those in use stay with their sequences."""
        while self._evict():
            pass
        self.pool.clear_index()

    def poison_free(self, value: float = float("nan")) -> None:
        """Overwrite what must not be read: free blocks and slots past the committed tokens."""
        free = slots_of(self.pool.free_blocks())
        tails = [s.slots[s.length :] for s in self._sequences.values()]
        for memory in (self.memory, *self._followers):
            memory.fill(np.concatenate([free, *tails]), value)
        if self.states is not None:
            self.states.poison_free(value)
