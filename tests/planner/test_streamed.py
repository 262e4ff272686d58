"""Dense models whose weights are read from disk in every step: rows are nearly free there."""

from __future__ import annotations

import pytest

from paceline.planner.choice import DraftLimits
from paceline.planner.cost import CostModel, prior_table
from paceline.planner.cost_table import StepShape
from paceline.planner.planner import MAX_NODES, MOST_NODES, CostAwarePlanner
from paceline.request.span import DraftTree
from tests.planner.machine import LOOKUP, cost_table, request

DEPTH, BRANCHES = 32, 7
PLAIN = StepShape(1, 9, 9, 1)


def bushy() -> DraftTree:
    """A likely chain, each of whose nodes has less likely siblings."""
    tokens, parents, probs, last = [], [], [], -1
    for _ in range(DEPTH):
        for branch in range(BRANCHES):
            tokens.append(branch)
            parents.append(last)
            probs.append(0.02 if branch else 0.85)
        last = len(tokens) - BRANCHES
    return DraftTree(tokens, parents, probs, [LOOKUP.name] * len(tokens))


def chosen(cost: CostModel) -> int:
    planner = CostAwarePlanner(cost)
    planner.set_sources([LOOKUP])
    cost.observe(PLAIN, 10.0)
    assert planner.begin(PLAIN, [request(1)]) == 0
    planner.drafts.begin([1])
    assert planner.ask(LOOKUP, [0]) == [0]
    planner.drafts.add(0, LOOKUP.name, bushy())
    planner.drafted(LOOKUP, [0], 0.01)
    (tree,) = planner.choose([DraftLimits(MOST_NODES, DEPTH, 1e-4)], node_budget=512)
    return len(tree)


def test_rows_that_compute_while_weights_are_read_cost_nothing() -> None:
    table, resident = prior_table(streamed=0.8), prior_table()
    assert table.milliseconds(16) == table.milliseconds(1) == 1.0
    assert 1.0 < table.milliseconds(256) < resident.milliseconds(256) / 4


@pytest.mark.parametrize("row_ms", [0.001, 0.01, 0.1, 1.0])
def test_many_nodes_are_looked_at_only_where_they_are_nearly_free(row_ms: float) -> None:
    cost = CostModel(cost_table([10.0 + row_ms * row for row in range(300)]))
    count = chosen(cost)
    if row_ms < 0.05:
        assert MAX_NODES < count <= MOST_NODES
    else:
        assert count <= MAX_NODES
