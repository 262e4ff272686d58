"""From what a planner was given and answered to nodes with their fate.

Pure functions. Why a node was left out is found by asking the planner's own choice what it would
have chosen without one of its rules. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.policy.choice import choose_nodes
from paceline.policy.planner import DraftLimits
from paceline.span import ROOT, DraftTree
from paceline.workbench.explain_steps import Cut, Node


@dataclass(frozen=True, slots=True)
class Terms:
    """By what the nodes of a step were chosen; all zero where a plan does not look at costs.

    Attributes:
        growth: milliseconds of the forward with 0, 1, 2, ... draft nodes.
        rate: tokens that a millisecond is worth.
        weights: of the requests; None is equal ones.
    """

    growth: Sequence[float] = ()
    rate: float = 0.0
    weights: Sequence[float] | None = None


def request_nodes(
    tree: DraftTree, reasons: Sequence[Cut | None], emitted: Sequence[int]
) -> list[Node]:
    """The nodes of a tree; ``reasons`` is parallel to them."""
    columns = (
        tree.token_ids,
        tree.parents,
        tree.depths(),
        tree.origins,
        tree.accept_probs,
        tree.path_probs(),
        reasons,
        labels(tree, emitted),
    )
    return [Node(*row) for row in zip(*columns, strict=True)]


def labels(tree: DraftTree, emitted: Sequence[int]) -> list[bool | None]:
    """For each node whether the target emitted its token there; None where that is not known."""
    depth_of = {ROOT: 0}  # of the nodes that the emitted tokens lead through
    found: list[bool | None] = []
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        depth = depth_of.get(parent)
        if depth is None or depth >= len(emitted):
            found.append(None)
            continue
        found.append(token == emitted[depth])
        if found[-1]:
            depth_of[node] = depth + 1
    return found


def cut_reasons(
    trees: Sequence[DraftTree],
    chosen: Sequence[DraftTree],
    verified: Sequence[DraftTree],
    limits: Sequence[DraftLimits],
    node_budget: int,
    terms: Terms,
) -> list[list[Cut | None]]:
    """Why each node was left out, found by asking what would be chosen if a rule did not hold.

    Args:
        trees: what there was to choose from, one per request; the others are parallel to it.
        chosen, verified: parts of ``trees``.
    """
    growth = terms.growth or [0.0] * (1 + sum(map(len, trees)))

    def choose(rate: float) -> list[list[int]]:
        weights = terms.weights
        return choose_nodes(trees, limits, growth, rate, weights=weights, node_budget=node_budget)

    found = []
    for tree, *parts, limit, allowed, paying in zip(
        trees, chosen, verified, limits, choose(0.0), choose(terms.rate), strict=True
    ):
        picked, run = (set(_places(tree, part)) for part in parts)
        reasons: list[Cut | None] = _beyond(tree, limit)
        for node in allowed:
            reasons[node] = Cut.COST
        for node in paying:
            reasons[node] = Cut.FAIRNESS if terms.growth else Cut.COUNT
        for node in picked:
            reasons[node] = None if node in run else Cut.DROPPED
        found.append(reasons)
    return found


def _beyond(tree: DraftTree, limit: DraftLimits) -> list[Cut | None]:
    """Which limit each node is beyond, for those that are."""
    return [
        Cut.DEPTH
        if depth > limit.max_depth
        else Cut.PROBABILITY
        if prob < limit.min_path_prob
        else Cut.COUNT
        for depth, prob in zip(tree.depths(), tree.path_probs(), strict=True)
    ]


def _places(tree: DraftTree, part: DraftTree) -> list[int]:
    """Where the nodes of a part stand in its tree: no two siblings carry one token."""
    place = {key: i for i, key in enumerate(zip(tree.parents, tree.token_ids, strict=True))}
    found: list[int] = []
    for parent, token in zip(part.parents, part.token_ids, strict=True):
        found.append(place[ROOT if parent < 0 else found[parent], token])
    return found
