"""The native choice of draft nodes against the one in Python, which it must equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from paceline.planner.choice import DraftLimits
from paceline.request.span import DraftTree
from tests.planner.test_choice import Problem, problems

native = pytest.importorskip("paceline._native", reason="the native kernels are not built")


def by_native_drafts(
    trees: list[DraftTree], limits: list[DraftLimits], growth: list[float], rate: float, **more: Any
) -> list[list[int]]:
    """``choose_nodes`` by the native drafts of a step."""
    drafts = native.Drafts(calibrates=False)
    drafts.begin(range(len(trees)))
    for index, tree in enumerate(trees):
        places = DraftTree(list(range(len(tree))), tree.parents, tree.accept_probs, tree.origins)
        drafts.add(index, "x", places)
    drafts.choose(limits, growth, rate, **more)
    return [tree.token_ids for tree in drafts.chosen()]


@given(problems(most=9, requests=4))
def test_both_choose_alike(problem: Problem) -> None:
    assert problem.chosen(by_native_drafts) == problem.chosen()


def test_a_wide_batch() -> None:
    """Trees of 64 nodes, as many as a step may have: all ranks meet in one heap."""
    trees = [
        DraftTree(
            list(range(64)),
            [-1, *(i * (r + 3) % i if i % 3 else i - 1 for i in range(1, 64))],
            [(i * 37 + r * 11) % 100 / 100 for i in range(64)],
            ["x"] * 64,
        )
        for r in range(32)
    ]
    growth = [40 + 0.1 * n - 3 * (n % 16 == 0) for n in range(513)]
    limits = [DraftLimits(24, 10)] * 32
    problem = Problem(trees, limits, growth, 1.2, None, 2048)
    chosen = problem.chosen(by_native_drafts)
    assert sum(map(len, chosen)) > 100
    assert chosen == problem.chosen()
