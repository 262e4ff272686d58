"""Pooling: that it finds whom to believe, and how much it means when several agree."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policy.evidence import CELLS_PER_ORIGIN
from paceline.policy.merging import merge
from paceline.policy.pooling import Pooling, shared_out
from paceline.span import ROOT, DraftTree

A, B = 0, CELLS_PER_ORIGIN
"""Cells of two proposers."""


def leaf(token: int, prob: float, cell: int) -> DraftTree:
    tree = DraftTree.chain([token], [prob], str(cell))
    tree.evidence = [cell]
    return tree


def pooled(pooling: Pooling, trees: list[DraftTree]) -> DraftTree:
    tree = merge(trees)
    pooling.pool(tree)
    return tree


@given(st.data())
def test_siblings_sum_to_less_than_one(data: st.DataObject) -> None:
    pooling = Pooling()
    for _ in range(4):
        trees = []
        for cell in (A, B):
            count = data.draw(st.integers(1, 6))
            parents = [data.draw(st.integers(ROOT, node - 1)) for node in range(count)]
            probs = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
            tree = DraftTree(list(range(count)), parents, probs, [str(cell)] * count)
            tree.evidence = [cell] * count
            trees.append(tree)
        tree = pooled(pooling, trees)
        for parent in set(tree.parents):
            below = [
                prob for p, prob in zip(tree.parents, tree.accept_probs, strict=True) if p == parent
            ]
            assert all(prob > 0.0 for prob in below)
            assert sum(below) < 1.0
        outcomes = [(node, data.draw(st.sampled_from((0.0, 1.0)))) for node in range(len(tree))]
        pooling.learn(tree, outcomes)


@pytest.mark.parametrize(("together", "alone"), [(0.9, 0.2), (0.4, 0.4)])
def test_how_much_agreement_means_is_learnt(together: float, alone: float) -> None:
    """Both say one half throughout; what that is worth depends on whether the other says it too."""
    pooling, rng = Pooling(), random.Random(0)
    late: dict[int, list[float]] = {1: [], 2: []}
    for step in range(3000):
        tree = pooled(pooling, [leaf(1, 0.5, A), leaf(1 + step % 2, 0.5, B)])
        agreed = len(tree) == 1
        right = rng.random() < (together if agreed else 2 * alone)
        chosen = 0 if agreed else rng.randrange(2)
        pooling.learn(tree, [(n, float(right and n == chosen)) for n in range(len(tree))])
        if step > 1000:
            late[len(tree)].append(tree.accept_probs[0])
    assert mean(late[1]) == pytest.approx(together, abs=0.06)
    assert mean(late[2]) == pytest.approx(alone, abs=0.06)


def test_who_is_always_right_where_they_differ_is_believed() -> None:
    pooling = Pooling()
    for _ in range(300):
        tree = pooled(pooling, [leaf(1, 0.6, A), leaf(2, 0.6, B)])
        pooling.learn(tree, [(0, 1.0), (1, 0.0)])
    right, wrong = pooled(pooling, [leaf(1, 0.6, A), leaf(2, 0.6, B)]).accept_probs
    assert right > 0.85
    assert wrong < 0.1


def test_a_label_that_repeats_for_ever_does_no_harm() -> None:
    pooling = Pooling()
    for outcome in (0.0, 1.0):
        for _ in range(2_000):
            tree = pooled(pooling, [leaf(1, 1.0, A), leaf(1, 0.9, B)])
            pooling.learn(tree, [(0, outcome)])
        low = pooled(pooling, [leaf(1, 0.1, A), leaf(1, 0.1, B)]).accept_probs[0]
        high = pooled(pooling, [leaf(1, 0.9, A), leaf(1, 0.9, B)]).accept_probs[0]
        assert 0.0 < low <= high < 1.0


def test_odds_are_shared_out_below_each_parent() -> None:
    assert shared_out([1.0, 2.0, 3.0], [ROOT, ROOT, 0]) == [0.25, 0.5, 0.75]
    assert shared_out([], []) == []
