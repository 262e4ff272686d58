"""The fixed planner: prefix-closed, within its caps, the best path first."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paceline.planner.choice import DraftLimits, best_path_first
from paceline.planner.planner import FixedPlanner
from paceline.request.span import DraftTree


def fixed(
    drafts: Sequence[DraftTree], limits: Sequence[DraftLimits], budget: int
) -> list[DraftTree]:
    """What a fixed planner verifies of one draft per request."""
    planner = FixedPlanner()
    planner.drafts.begin(range(len(drafts)))
    for index, tree in enumerate(drafts):
        planner.drafts.add(index, "x", tree)
    return planner.choose(limits, budget)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    count = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
    probs = [draw(st.floats(0.01, 1.0)) for _ in range(count)]
    return DraftTree(list(range(count)), parents, probs, ["x"] * count)


@given(
    st.lists(trees(), min_size=1, max_size=4),
    st.integers(0, 8),
    st.integers(0, 4),
    st.integers(0, 20),
    st.floats(0, 0.5),
)
def test_choice_keeps_its_caps_and_every_parent(
    drafts: list[DraftTree], nodes: int, depth: int, budget: int, floor: float
) -> None:
    limits = [DraftLimits(nodes, depth, floor)] * len(drafts)
    chosen = fixed(drafts, limits, budget)
    assert sum(map(len, chosen)) <= budget
    for tree, drafted in zip(chosen, drafts, strict=True):
        tree.validate(vocab_size=12)
        assert len(tree) <= nodes
        assert max(tree.depths(), default=0) <= depth
        known = dict(zip(drafted.token_ids, drafted.path_probs(), strict=True))
        for token, prob in zip(tree.token_ids, tree.path_probs(), strict=True):
            assert abs(known[token] - prob) < 1e-12, "a node kept its path"
            assert prob >= floor


def test_the_likeliest_nodes_win_over_all_requests() -> None:
    sure = DraftTree.chain([1, 2, 3], [0.9, 0.9, 0.9], "x")
    unsure = DraftTree.chain([4, 5, 6], [0.5, 0.5, 0.5], "x")
    limits = [DraftLimits(8, 8)] * 2
    first, second = fixed([sure, unsure], limits, 4)
    assert (first.token_ids, second.token_ids) == ([1, 2, 3], [4])


def test_best_path_comes_first() -> None:
    #  0 -> 1, 2;  2 -> 3: the path over 2 and 3 is the likelier one
    tree = DraftTree([10, 11, 12, 13], [-1, 0, 0, 2], [0.9, 0.2, 0.7, 0.9], ["x"] * 4)
    assert best_path_first(tree, [0, 1, 2, 3]) == [0, 2, 3, 1]
