"""The block pool: users, the prefix index, and which block is given up first."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from paceline.cache.block_pool import BlockPool, chain_hash
from paceline.models.backend import BLOCK_SIZE

TOKENS = list(range(BLOCK_SIZE))
OTHER = list(range(1, BLOCK_SIZE + 1))


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4) or []) == [1, 2, 3, 4]
    assert pool.allocate(1) is None


def test_an_allocation_that_fails_changes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(4) is None
    assert (pool.num_available, pool.num_used) == (3, 0)


def test_a_block_is_free_when_its_last_user_left() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1) or []
    pool.share(block)
    pool.release([block])
    assert (pool.users(block), pool.num_used) == (1, 1)
    pool.release([block])
    assert pool.num_used == 0
    assert block in pool.free_blocks()


def test_releasing_twice_is_our_own_bug() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1) or []
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_published_blocks_are_found_by_their_content() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2) or []
    key = pool.publish(first, b"", TOKENS)
    pool.publish(second, key, OTHER)
    assert pool.find(b"", TOKENS) == (first, key)
    assert pool.find(key, OTHER) == (second, chain_hash(key, OTHER))
    assert pool.find(b"", OTHER) is None
    assert pool.find(b"salt", TOKENS) is None


def test_a_match_is_confirmed_by_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cache.block_pool.chain_hash", lambda parent, tokens: b"same")
    pool = BlockPool(3)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"", TOKENS)
    assert pool.find(b"", TOKENS) == (block, b"same")
    assert pool.find(b"", OTHER) is None
    assert pool.find(b"x", TOKENS) is None


def test_the_first_block_with_a_content_stays_indexed() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2) or []
    assert pool.publish(first, b"", TOKENS) == pool.publish(second, b"", TOKENS)
    pool.release([second])
    assert second in pool.free_blocks()
    assert pool.find(b"", TOKENS) == (first, chain_hash(b"", TOKENS))


def test_cached_blocks_are_evicted_only_when_needed_and_oldest_first() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2) or []
    pool.publish(old, b"", TOKENS)
    pool.publish(new, b"", OTHER)
    pool.release([old])
    pool.release([new])
    assert pool.num_available == 3
    assert pool.allocate(2) == [3, old]  # the free one, then the one unused for longest
    assert pool.find(b"", TOKENS) is None
    assert pool.find(b"", OTHER) is not None


def test_a_sequences_tail_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    head, tail = pool.allocate(2) or []
    key = pool.publish(head, b"", TOKENS)
    pool.publish(tail, key, TOKENS)
    pool.release([head, tail])
    assert pool.allocate(1) == [tail]


def test_using_a_cached_block_protects_it() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"", TOKENS)
    pool.release([block])
    pool.share(block)
    assert pool.allocate(1) is None


def test_clearing_the_index_frees_what_nobody_uses() -> None:
    pool = BlockPool(4)
    used, unused = pool.allocate(2) or []
    pool.publish(used, b"", TOKENS)
    pool.publish(unused, b"", OTHER)
    pool.release([unused])
    pool.clear_index()
    assert pool.find(b"", TOKENS) is None
    assert unused in pool.free_blocks()
    pool.release([used])
    assert pool.num_used == 0
    assert len(pool.free_blocks()) == 3


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations against a plain count of users."""

    held = Bundle("held")  # one entry per user of a block

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.users = [0] * 7

    @rule(target=held, count=st.integers(0, 4))
    def allocate(self, count: int) -> object:
        before = self.pool.num_available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > before)
        for block in blocks or []:
            assert self.users[block] == 0
            self.users[block] = 1
        return multiple(*(blocks or []))

    @rule(target=held, block=held)
    def share(self, block: int) -> int:
        self.pool.share(block)
        self.users[block] += 1
        return block

    @rule(block=consumes(held))
    def release(self, block: int) -> None:
        self.pool.release([block])
        self.users[block] -= 1

    @rule(block=held, content=st.integers(0, 3))
    def publish(self, block: int, content: int) -> None:
        self.pool.publish(block, b"", [content] * BLOCK_SIZE)

    @rule(target=held, content=st.integers(0, 3))
    def find_and_share(self, content: int) -> object:
        found = self.pool.find(b"", [content] * BLOCK_SIZE)
        if found is None:
            return multiple()
        self.pool.share(found[0])
        self.users[found[0]] += 1
        return found[0]

    @rule()
    def clear(self) -> None:
        self.pool.clear_index()

    @invariant()
    def counts_agree(self) -> None:
        assert [self.pool.users(block) for block in range(7)] == self.users
        assert self.pool.num_used == sum(users > 0 for users in self.users)
        free = self.pool.free_blocks()
        assert len(set(free)) == len(free)
        assert all(self.users[block] == 0 for block in free)
        assert 0 not in free


TestPool = PoolMachine.TestCase
