"""The native choice of draft nodes against the one in Python, which it must equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

from paceline.policy.planner import DraftLimits
from paceline.span import DraftTree
from tests.policy.test_choice import Problem, problems

native = pytest.importorskip("paceline._native", reason="the native kernels are not built")


@given(problems(most=9, requests=4))
def test_both_choose_alike(problem: Problem) -> None:
    assert problem.chosen(native.choose_nodes) == problem.chosen()


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
    chosen = problem.chosen(native.choose_nodes)
    assert sum(map(len, chosen)) > 100
    assert chosen == problem.chosen()


def test_any_sequence_will_do() -> None:
    tree = SimpleNamespace(parents=range(-1, 2), accept_probs=(1, 0.9, 0.8))
    limits = (DraftLimits(8, 8),)
    assert native.choose_nodes((tree,), limits, (10, 10), 0.1, node_budget=9) == [[0]]


GOOD: dict[str, Any] = {
    "trees": [DraftTree.chain([5], [0.5], "x")],
    "limits": [DraftLimits(8, 8)],
    "growth": [1.0, 1.0],
    "rate": 0.1,
    "node_budget": 8,
}


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ({"trees": [DraftTree([5], [0], [0.5], ["x"])]}, ValueError, "node 0 is 0; allowed are -1"),
        ({"trees": [DraftTree([5], [-2], [0.5], ["x"])]}, ValueError, "node 0 is -2"),
        ({"trees": [DraftTree([5], [-1], [], ["x"])]}, ValueError, "differ in length"),
        ({"trees": [DraftTree([5], ["a"], [0.5], ["x"])]}, TypeError, "str"),
        ({"trees": [DraftTree([5], [-1], ["a"], ["x"])]}, TypeError, "str"),
        ({"trees": [None]}, AttributeError, "parents"),
        ({"trees": 5}, TypeError, "trees are no sequence"),
        ({"limits": []}, ValueError, "trees and limits differ"),
        ({"limits": [None]}, AttributeError, "max_nodes"),
        ({"growth": ["a", 1.0]}, TypeError, "str"),
        ({"slowdown": "a"}, TypeError, "str"),
        ({"ahead": [1.0, 1.0]}, ValueError, "trees and ahead differ"),
        ({"ahead": 1.0}, TypeError, "ahead are no sequence"),
    ],
)
def test_faulty_arguments_are_refused(
    fault: dict[str, Any], error: type[Exception], message: str
) -> None:
    assert native.choose_nodes(**GOOD) == [[0]]
    with pytest.raises(error, match=message):
        native.choose_nodes(**GOOD | fault)
