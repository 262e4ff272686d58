"""Merging the trees of several proposers into one trie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planner.drafts import merge
from paceline.request.span import ROOT, DraftTree
from tests.request.test_span import VOCAB, draft_trees, paths

FORESTS = st.lists(draft_trees(), max_size=4)


@given(FORESTS)
def test_merging_keeps_every_path_and_adds_none(trees: list[DraftTree]) -> None:
    merged = merge(trees)
    assert sorted(paths(merged)) == sorted({path for tree in trees for path in paths(tree)})


@given(FORESTS)
def test_a_merged_tree_is_a_tree(trees: list[DraftTree]) -> None:
    merged = merge(trees)
    merged.validate(VOCAB)  # parents first, no two siblings with one token
    for parent in range(ROOT, len(merged)):
        siblings = [node for node, above in enumerate(merged.parents) if above == parent]
        assert sum(merged.accept_probs[node] for node in siblings) <= 1.0 + 1e-9


@given(FORESTS)
def test_origins_come_from_who_drafted_the_path(trees: list[DraftTree]) -> None:
    merged = merge(trees)
    drafted = {
        (path, origin)
        for tree in trees
        for path, origin in zip(paths(tree), tree.origins, strict=True)
    }
    for path, origin in zip(paths(merged), merged.origins, strict=True):
        assert (path, origin) in drafted


@given(draft_trees())
def test_one_tree_stays_what_it_is(tree: DraftTree) -> None:
    assert merge([tree]) == tree
    assert merge([DraftTree(), tree, DraftTree()]) == tree


@given(FORESTS)
def test_merging_changes_no_argument(trees: list[DraftTree]) -> None:
    before = [(t.token_ids[:], t.parents[:], t.accept_probs[:], t.origins[:]) for t in trees]
    merge(trees)
    assert before == [(t.token_ids, t.parents, t.accept_probs, t.origins) for t in trees]


def test_nothing_merges_to_nothing() -> None:
    assert len(merge([])) == len(merge([DraftTree(), DraftTree()])) == 0


def test_agreement_raises_the_probability() -> None:
    merged = merge([DraftTree.chain([1], [0.5], "a"), DraftTree.chain([1], [0.6], "b")])
    assert merged.accept_probs == pytest.approx([2.5 / 3.5])  # the odds are 1 and 1.5
    assert merged.origins == ["b"]  # the surer one


def test_disagreement_shares_what_there_is() -> None:
    merged = merge([DraftTree.chain([1], [0.9], "a"), DraftTree.chain([2], [0.9], "b")])
    assert merged.accept_probs == pytest.approx([9 / 19, 9 / 19])


def test_a_proposer_alone_keeps_its_estimates() -> None:
    tree = DraftTree([1, 2, 3], [ROOT, ROOT, 0], [0.5, 0.3, 0.8], ["a"] * 3)
    other = DraftTree.chain([1, 3, 4], [0.0, 0.0, 1.0], "b")
    merged = merge([tree, other])
    assert merged.accept_probs[:3] == pytest.approx([0.5, 0.3, 0.8])
    assert merged.accept_probs[3] == pytest.approx(1.0, abs=0.002)


# What is remembered


@given(st.lists(draft_trees(), min_size=2, max_size=4))
def test_every_proposer_that_named_a_node_is_remembered(trees: list[DraftTree]) -> None:
    said = {}
    for number, tree in enumerate(trees):
        tree.origins = [f"proposer {number}"] * len(tree)
        for path, origin, prob in zip(paths(tree), tree.origins, tree.accept_probs, strict=True):
            said.setdefault(path, []).append((origin, prob))
    merged = merge(trees)
    nodes = range(len(merged))
    assert {path: merged.claims_of(i) for i, path in zip(nodes, paths(merged), strict=True)} == said
    if not merged.claims:  # of one tree at most
        assert sum(map(bool, map(len, trees))) <= 1
        return
    for claims, origin in zip(merged.claims, merged.origins, strict=True):
        assert dict(claims)[origin] == max(prob for _, prob in claims)
    kept = [node for node, parent in enumerate(merged.parents) if parent == ROOT]
    assert merged.select(kept).claims == [merged.claims[node] for node in kept]
