"""KV transactions in any order, against a model in which every slot's content is known.

A token's KV is stood in for by a number that depends on all tokens up to it, as real KV does.
"""

from __future__ import annotations

import weakref
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.backends.rows.row_batch import build_batch
from paceline.backends.rows.tensor_memory import TensorKV
from paceline.cache.kv_cache import KVCache
from paceline.core.errors import ConfigError
from paceline.models.backend import BLOCK_SIZE
from paceline.models.config import ModelConfig
from paceline.request.span import Span
from tests.arrays import same

TINY = ModelConfig(
    architecture="tiny",
    vocab_size=8,
    hidden_size=2,
    intermediate_size=2,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    max_position=1024,
)
NUM_BLOCKS = 12


def content(tokens: list[int]) -> float:
    """What the KV of the last of these tokens holds."""
    return float(zlib.crc32(bytes(tokens)) % (1 << 20) + 1)


def write(kv: KVCache, slot: int, value: float) -> None:
    for layer in range(2):
        for part in range(2):
            kv.memory.layers[layer][part, slot] = value + layer / 2 + part / 4


def check(kv: KVCache, slots: np.ndarray, tokens: list[int]) -> None:
    expected = torch.tensor([content(tokens[: i + 1]) for i in range(len(tokens))])
    for layer in range(2):
        for part in range(2):
            found = kv.memory.layers[layer][part, torch.from_numpy(slots), 0, 0]
            assert same(found, expected + layer / 2 + part / 4)


class KVMachine(RuleBasedStateMachine):
    """``tokens`` holds the committed tokens of each open sequence, ``salts`` its partition."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCache(TensorKV(TINY, NUM_BLOCKS))
        self.kv.poison_free()
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}
        self.next_id = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def add(self, tokens: list[int], salt: str) -> None:
        self.tokens[self.next_id], self.salts[self.next_id] = tokens, salt
        self.next_id += 1

    @precondition(lambda self: len(self.tokens) < 5)
    @rule(salt=st.sampled_from(["", "x"]))
    def open(self, salt: str) -> None:
        self.kv.open(self.next_id, salt)
        self.add([], salt)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), token=st.integers(0, 1), count=st.integers(1, 40))
    def chunk(self, data: st.DataObject, token: int, count: int) -> None:
        self.step(self.pick(data), [token] * count, list(range(-1, count - 1)), range(count))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 20), rejected=st.booleans())
    def draft(self, data: st.DataObject, count: int, rejected: bool) -> None:
        tokens = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        parents = [data.draw(st.integers(0 if i else -1, i - 1)) for i in range(count)]
        node = data.draw(st.integers(0, count - 1))
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        self.step(self.pick(data), tokens, parents, [] if rejected else path)

    def step(
        self, request_id: int, drafted: list[int], parents: list[int], path: range | list[int]
    ) -> None:
        sequence, tokens = self.kv[request_id], self.tokens[request_id]
        missing = self.kv.blocks_missing(request_id, len(drafted))
        available = self.kv.pool.num_available
        before = list(sequence.block_table)
        if not self.kv.reserve(request_id, len(drafted)):
            assert missing > available
            assert sequence.block_table == before
            return
        assert self.kv.pool.num_available == available - missing
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else tokens), drafted[node]])
            write(self.kv, int(sequence.slots[len(tokens) + node]), content(paths[node]))
        if path:
            self.kv.commit(request_id, path)
            self.tokens[request_id] = paths[path[-1]]
        else:
            self.kv.rollback(request_id)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        self.kv.publish(request_id, self.tokens[request_id])

    @precondition(lambda self: 0 < len(self.tokens) < 5)
    @rule(data=st.data(), salt=st.sampled_from(["", "x"]), slack=st.integers(0, 20))
    def open_with_a_known_prefix(self, data: st.DataObject, salt: str, slack: int) -> None:
        wanted = [*self.tokens[self.pick(data)], 2]
        self.kv.open(self.next_id, salt)
        found = self.kv.attach_prefix(self.next_id, wanted, len(wanted) - slack)
        assert found % BLOCK_SIZE == 0
        assert found <= max(0, len(wanted) - slack)
        self.add(wanted[:found], salt)  # the invariant confirms that the content is theirs

    @precondition(lambda self: 0 < len(self.tokens) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        length = data.draw(st.integers(0, len(self.tokens[parent])))
        if self.kv.fork(parent, self.next_id, length):
            self.add(self.tokens[parent][:length], self.salts[parent])
        else:
            assert self.kv.pool.num_available == 0
            assert self.next_id not in self.kv

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        sequence = self.kv[request_id]
        shared = any(self.kv.pool.users(block) > 1 for block in sequence.block_table)
        if sequence.published or shared:
            return
        length = data.draw(st.integers(0, len(self.tokens[request_id])))
        self.kv.truncate(request_id, length)
        del self.tokens[request_id][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        self.kv.free(request_id)
        del self.tokens[request_id], self.salts[request_id]

    @rule()
    def clear_index(self) -> None:
        self.kv.flush_prefixes()

    @invariant()
    def committed_content_is_kept(self) -> None:
        self.kv.poison_free()
        for request_id, tokens in self.tokens.items():
            sequence = self.kv[request_id]
            assert sequence.length == len(tokens)
            assert len(sequence.slots) == len(sequence.block_table) * BLOCK_SIZE
            check(self.kv, sequence.slots[: len(tokens)], tokens)
        assert not any(held[:, :BLOCK_SIZE].any() for held in self.kv.memory.layers)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        users = [0] * NUM_BLOCKS
        for request_id, tokens in self.tokens.items():
            table = self.kv[request_id].block_table
            assert len(table) == -(-len(tokens) // BLOCK_SIZE)
            for block in table:
                users[block] += 1
        assert [self.kv.pool.users(block) for block in range(NUM_BLOCKS)] == users
        assert self.kv.pool.num_used == sum(count > 0 for count in users)

    @invariant()
    def only_full_blocks_are_shared(self) -> None:
        for sequence in map(self.kv.__getitem__, self.tokens):
            for block in sequence.block_table[sequence.length // BLOCK_SIZE :]:
                assert self.kv.pool.users(block) == 1

    def teardown(self) -> None:
        for request_id in self.tokens:
            self.kv.free(request_id)
        assert self.kv.pool.num_used == 0


TestKV = KVMachine.TestCase


# --- what the rows of a forward see ---------------------------------------------------------------


def ancestors(parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@st.composite
def spans(draw: st.DrawFn, request_id: int) -> Span:
    count = draw(st.integers(1, 9))
    parents = [draw(st.integers(0 if i else -1, i - 1)) for i in range(count)]
    cached = draw(st.integers(0, count - 1))
    tokens = draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    rows = draw(st.lists(st.integers(cached, count - 1), unique=True))
    return Span(request_id, draw(st.integers(0, 40)), tokens, parents, sorted(rows), cached)


@given(st.tuples(spans(1), spans(2)))
def test_a_row_sees_its_prefix_and_its_ancestors_in_order(items: tuple[Span, Span]) -> None:
    memory = TensorKV(TINY, NUM_BLOCKS)
    kv = KVCache(memory)
    for span in items:
        kv.open(span.request_id)
        assert kv.reserve(span.request_id, span.start)
        if span.start:
            kv.commit(span.request_id, range(span.start))
        assert kv.reserve(span.request_id, len(span.token_ids))
    tables = kv.block_tables([span.request_id for span in items])
    batch = build_batch(items, tables, memory.layers, 4, TINY)
    seen: dict[int, list[int]] = {}
    for group in batch.attention.groups:
        for row, slots in zip(group.rows.tolist(), group.slots.tolist(), strict=True):
            seen[row] = slots
    row = 0
    sampled = []
    for span in items:
        slots = kv[span.request_id].slots.tolist()
        for node in range(span.num_cached, len(span.token_ids)):
            path = ancestors(list(span.parents), node)
            visible = slots[: span.start] + [slots[span.start + i] for i in path]
            assert seen[row][: len(visible)] == visible
            assert not any(seen[row][len(visible) :])
            assert batch.attention.write_slots[row] == slots[span.start + node]
            assert batch.input_ids[row] == span.token_ids[node]
            assert batch.positions[row] == span.start + len(path) - 1
            sampled += [row] * (node in span.sample_rows)
            row += 1
    assert (row, len(seen)) == (batch.num_rows, batch.num_rows)
    assert batch.sample_rows == sampled
    assert len(batch.input_ids) % 4 == 0


# --- single cases ---------------------------------------------------------------------------------


def test_a_cache_needs_room_for_a_block() -> None:
    with pytest.raises(ConfigError, match="raise --kv-cache-memory"):
        KVCache(TensorKV(TINY, 1))


def test_unknown_sequences_may_be_freed() -> None:
    KVCache(TensorKV(TINY, 3)).free(99)


def test_without_prefix_caching_nothing_is_shared() -> None:
    kv = KVCache(TensorKV(TINY, NUM_BLOCKS), prefix_caching=False)
    tokens = [1] * 2 * BLOCK_SIZE
    for request_id in (1, 2):
        kv.open(request_id)
        assert kv.attach_prefix(request_id, tokens, len(tokens)) == 0
        assert kv.reserve(request_id, len(tokens))
        kv.commit(request_id, range(len(tokens)))
        kv.publish(request_id, tokens)
    assert kv.pool.num_used == 4
    kv.free(1)
    assert len(kv.pool.free_blocks()) == NUM_BLOCKS - 1 - 2


def test_salts_keep_callers_apart() -> None:
    kv = KVCache(TensorKV(TINY, NUM_BLOCKS))
    tokens = [1] * BLOCK_SIZE
    kv.open(1, "mine")
    assert kv.reserve(1, BLOCK_SIZE)
    kv.commit(1, range(BLOCK_SIZE))
    kv.publish(1, tokens)
    for request_id, salt, found in ((2, "mine", BLOCK_SIZE), (3, "", 0), (4, "yours", 0)):
        kv.open(request_id, salt)
        assert kv.attach_prefix(request_id, tokens, BLOCK_SIZE) == found


def test_shared_blocks_cannot_be_cut() -> None:
    kv = KVCache(TensorKV(TINY, NUM_BLOCKS))
    kv.open(1)
    assert kv.reserve(1, BLOCK_SIZE)
    kv.commit(1, range(BLOCK_SIZE))
    assert kv.fork(1, 2, BLOCK_SIZE)
    with pytest.raises(AssertionError, match="shared"):
        kv.truncate(1, 3)


class Follower:
    """A number for each slot, which lies where the token's keys and values do."""

    num_blocks = NUM_BLOCKS

    def __init__(self) -> None:
        self.numbers = np.arange(NUM_BLOCKS * BLOCK_SIZE)

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        self.numbers[target] = self.numbers[source]

    def fill(self, slots: np.ndarray, value: float) -> None:
        self.numbers[slots] = value


def test_what_follows_goes_where_keys_and_values_go_until_it_is_dropped() -> None:
    kv, follower = KVCache(TensorKV(TINY, NUM_BLOCKS)), Follower()
    kv.follow(follower)
    kv.open(1)
    assert kv.reserve(1, 8)
    first = kv[1].slots[0]
    kv.commit(1, [0, 2, 5])
    assert follower.numbers[kv[1].slots[:3]].tolist() == [first, first + 2, first + 5]
    assert kv.fork(1, 2, 3)
    assert kv[2].slots[0] != first
    assert follower.numbers[kv[2].slots[:3]].tolist() == [first, first + 2, first + 5]
    kv.poison_free(-1)
    assert follower.numbers[kv[2].slots[3]] == -1
    moved = weakref.ref(follower)
    del follower
    assert moved() is None
