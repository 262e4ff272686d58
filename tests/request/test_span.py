"""Draft trees and spans: each rule of a tree can fail, and the derived arrays are right."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ProposerError
from paceline.request.span import ROOT, DraftTree, Span

VOCAB = 10


@st.composite
def draft_trees(draw: st.DrawFn, max_nodes: int = 12, vocab: int = VOCAB) -> DraftTree:
    """Valid trees of any shape whose siblings' probabilities sum to at most 1."""
    tree = DraftTree()
    taken: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(ROOT, len(tree) - 1))
        token = draw(st.integers(0, vocab - 1))
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        left = 1.0 - sum(
            p for p, up in zip(tree.accept_probs, tree.parents, strict=True) if up == parent
        )
        tree.token_ids.append(token)
        tree.parents.append(parent)
        tree.accept_probs.append(draw(st.floats(0.0, max(0.0, left))))
        tree.origins.append(draw(st.sampled_from(["a", "b"])))
    return tree


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root down to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def small_tree() -> DraftTree:
    return DraftTree([1, 2, 3], [ROOT, 0, 0], [0.5, 0.25, 0.5], ["a", "a", "b"])


def set_item(name: str, node: int, value: object) -> Callable[[DraftTree], None]:
    def damage(tree: DraftTree) -> None:
        getattr(tree, name)[node] = value

    return damage


def drop_item(name: str) -> Callable[[DraftTree], None]:
    def damage(tree: DraftTree) -> None:
        getattr(tree, name).pop()

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_item("token_ids"), "arrays differ in length"),
        (drop_item("parents"), "arrays differ in length"),
        (drop_item("accept_probs"), "arrays differ in length"),
        (drop_item("origins"), "arrays differ in length"),
        (set_item("token_ids", 1, -1), "draft node 1: token -1 is not in 0..9"),
        (set_item("token_ids", 2, VOCAB), "draft node 2: token 10 is not in 0..9"),
        (set_item("token_ids", 0, 1.0), "draft node 0: token 1.0"),
        (set_item("token_ids", 0, True), "draft node 0: token True"),
        (set_item("parents", 1, 1), "draft node 1: parent 1 is not in -1..0"),
        (set_item("parents", 1, 2), "draft node 1: parent 2"),
        (set_item("parents", 2, -2), "draft node 2: parent -2"),
        (set_item("parents", 2, 0.0), "draft node 2: parent 0.0"),
        (set_item("token_ids", 2, 2), "draft node 2: a sibling carries token 2 already"),
    ],
)
def test_validate_names_what_is_malformed(
    damage: Callable[[DraftTree], None], message: str
) -> None:
    tree = small_tree()
    tree.validate(VOCAB)
    damage(tree)
    with pytest.raises(ProposerError, match=re.escape(message)):
        tree.validate(VOCAB)


def test_siblings_at_the_root_must_differ_too() -> None:
    tree = DraftTree([4, 4], [ROOT, ROOT], [0.5, 0.5], ["a", "a"])
    with pytest.raises(ProposerError, match="draft node 1: a sibling"):
        tree.validate(VOCAB)


def test_cousins_may_carry_the_same_token() -> None:
    DraftTree([4, 5, 6, 6], [ROOT, ROOT, 0, 1], [0.5] * 4, ["a"] * 4).validate(VOCAB)


@given(draft_trees())
def test_generated_trees_are_trees(tree: DraftTree) -> None:
    tree.validate(VOCAB)


def test_depths_and_path_probs() -> None:
    tree = small_tree()
    assert tree.depths() == [1, 2, 2]
    assert tree.path_probs() == [0.5, 0.125, 0.25]
    assert DraftTree().depths() == DraftTree().path_probs() == []


@given(draft_trees())
def test_a_path_is_never_likelier_than_its_beginning(tree: DraftTree) -> None:
    probs = tree.path_probs()
    assert [len(path) for path in paths(tree)] == tree.depths()
    for node, parent in enumerate(tree.parents):
        assert probs[node] <= (probs[parent] if parent >= 0 else 1.0)


def test_select_renumbers_parents() -> None:
    chosen = small_tree().select([0, 2])
    assert (chosen.token_ids, chosen.parents) == ([1, 3], [ROOT, 0])
    assert (chosen.accept_probs, chosen.origins) == ([0.5, 0.5], ["a", "b"])


@given(draft_trees(), st.data())
def test_select_keeps_the_chosen_paths(tree: DraftTree, data: st.DataObject) -> None:
    likely = sorted(range(len(tree)), key=lambda node: -tree.path_probs()[node])
    chosen = likely[: data.draw(st.integers(0, len(tree)))]  # prefixes of this order are trees
    assert paths(tree.select(chosen)) == [paths(tree)[node] for node in chosen]


def test_chain() -> None:
    tree = DraftTree.chain([7, 8], [0.5, 0.4], "a")
    assert (tree.parents, tree.origins) == ([ROOT, 0], ["a", "a"])
    assert Span.tree(1, 5, 3, tree).is_chain


def test_a_span_roots_the_tree_at_the_last_token() -> None:
    span = Span.tree(7, 5, 9, small_tree())
    assert list(span.token_ids) == [9, 1, 2, 3]
    assert list(span.parents) == [-1, 0, 1, 1]
    assert list(span.sample_rows) == [0, 1, 2, 3]
    assert not span.is_chain


@pytest.mark.parametrize(("sample", "rows"), [(True, [2]), (False, [])])
def test_a_chunk_samples_its_last_row_at_most(sample: bool, rows: list[int]) -> None:
    span = Span.chunk(7, 5, [1, 2, 3], sample)
    assert list(span.parents) == [-1, 0, 1]
    assert list(span.sample_rows) == rows
    assert span.is_chain


def test_estimates_are_brought_into_their_range() -> None:
    probs = [0.5, 1.5, -0.1, float("nan"), float("inf"), 1.0]
    tree = DraftTree.chain(range(6), probs, "a")
    assert tree.clamp_probs() == 4
    assert tree.accept_probs == [0.5, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert tree.clamp_probs() == 0


@given(draft_trees(), st.integers(0, 12), st.integers(0, 5))
def test_a_tree_within_bounds_is_its_first_nodes_that_are_not_too_deep(
    tree: DraftTree, nodes: int, depth: int
) -> None:
    found = tree.within(nodes, depth)
    found.validate(VOCAB)
    assert paths(found) == [path for path in paths(tree) if len(path) <= depth][:nodes]


@given(draft_trees(vocab=3), st.lists(st.integers(0, 2), max_size=6), st.integers(0, 6))
def test_a_tree_follows_a_text_as_far_as_it_has_its_tokens(
    tree: DraftTree, text: list[int], start: int
) -> None:
    known, rest = paths(tree), tuple(text[start:])
    reached = [known.index(rest[:n]) for n in range(1, len(rest) + 1) if rest[:n] in known]
    assert tree.follow(text, start) == reached
    for node, path in enumerate(known):
        parent = known.index(path[:-1]) if path[:-1] else ROOT
        assert tree.child(parent, path[-1]) == node
    assert tree.child(ROOT, 3) is None


@given(draft_trees(vocab=3), st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_outcomes_are_those_of_all_nodes_beside_the_emitted_tokens(
    tree: DraftTree, emitted: list[int]
) -> None:
    expected = {
        node: path == tuple(emitted[: len(path)])
        for node, path in enumerate(paths(tree))
        if path[:-1] == tuple(emitted[: len(path) - 1]) and len(path) <= len(emitted)
    }
    found = tree.outcomes(emitted)
    assert dict(found) == expected
    assert [node for node, _ in found] == sorted(expected)
