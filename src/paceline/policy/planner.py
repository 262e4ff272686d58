"""Which draft nodes a step verifies. Owns the choice; knows neither proposers nor forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.span import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What one request may use in one step.

    Attributes:
        max_nodes: draft nodes; 0 means that it decodes plainly.
        max_depth: tokens along a path.
        min_path_prob: nodes less likely to be reached and accepted than this are left out.
    """

    max_nodes: int
    max_depth: int
    min_path_prob: float = 0.0


class Planner(Protocol):
    """Chooses nodes for the whole step at once."""

    def choose(
        self, trees: Sequence[DraftTree], limits: Sequence[DraftLimits], node_budget: int
    ) -> list[DraftTree]:
        """The trees to verify: prefix-closed parts of those drafted, the best path first.

        Args:
            trees: one merged tree per request.
            limits: parallel to ``trees``.
            node_budget: most draft nodes over all requests.
        """
        ...


class FixedPlanner:
    """Takes the likeliest nodes up to fixed caps, whatever they cost."""

    def choose(
        self, trees: Sequence[DraftTree], limits: Sequence[DraftLimits], node_budget: int
    ) -> list[DraftTree]:
        chosen = [
            self._within(tree, limit) if len(tree) else []
            for tree, limit in zip(trees, limits, strict=True)
        ]
        if sum(map(len, chosen)) > node_budget:
            chosen = _share(trees, chosen, node_budget)
        return [
            tree if nodes == list(range(len(tree))) else tree.select(nodes)
            for tree, nodes in zip(trees, chosen, strict=True)
        ]

    def _within(self, tree: DraftTree, limit: DraftLimits) -> list[int]:
        probs = tree.path_probs()
        if tree.is_chain:
            longest = min(len(tree), limit.max_nodes, limit.max_depth)
            if longest == 0 or probs[longest - 1] >= limit.min_path_prob:
                return list(range(longest))
            return list(range(sum(prob >= limit.min_path_prob for prob in probs[:longest])))
        depths = tree.depths()
        nodes = [
            i
            for i in range(len(tree))
            if depths[i] <= limit.max_depth and probs[i] >= limit.min_path_prob
        ]
        if len(nodes) > limit.max_nodes:
            # Prefix-closed: a child is never likelier than its parent and comes after it.
            nodes = sorted(nodes, key=lambda i: (-probs[i], i))[: limit.max_nodes]
        return best_path_first(tree, nodes)


def _share(
    trees: Sequence[DraftTree], chosen: Sequence[list[int]], node_budget: int
) -> list[list[int]]:
    """The likeliest nodes over all requests, up to the budget."""
    ranked = sorted(
        (-prob, owner, node)
        for owner, tree in enumerate(trees)
        if chosen[owner]
        for node, prob in enumerate(tree.path_probs())
        if node in set(chosen[owner])
    )
    kept: list[list[int]] = [[] for _ in trees]
    for _, owner, node in ranked[: max(0, node_budget)]:
        kept[owner].append(node)
    return [best_path_first(tree, sorted(nodes)) for tree, nodes in zip(trees, kept, strict=True)]


def best_path_first(tree: DraftTree, nodes: Sequence[int]) -> list[int]:
    """Order prefix-closed ``nodes``: the likeliest path first, parents before children.

    The usual accepted path then needs no move in the KV cache.
    """
    children: dict[int, list[int]] = {}
    for node in nodes:
        children.setdefault(tree.parents[node], []).append(node)
    path: list[int] = []
    at = ROOT
    while below := children.get(at):
        at = max(below, key=lambda i: (tree.accept_probs[i], -i))
        path.append(at)
    on_path = set(path)
    return path + sorted(node for node in nodes if node not in on_path)
