"""Several draft trees of one request as one. Knows no proposer and no choice.

The native ``merge`` makes the same tree of the same trees.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.request.span import ROOT, DraftTree

LEAST_LEFT = 0.001
"""Who leaves less than this to other tokens is taken to leave so much."""


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """One trie out of several trees of the same request.

    Children of one node that carry the same token become one. It remembers what every proposer that
    named it said, and has the origin of the surest of them. A proposer's estimate
    is worth its odds against what it leaves to tokens that it did not draft there; the odds of all
    are added, and shared out so that siblings' probabilities sum to less than 1.
    """
    full = [tree for tree in trees if len(tree)]
    if len(full) <= 1:
        return full[0] if full else DraftTree()
    merged = DraftTree()
    index: dict[tuple[int, int], int] = {}
    surest: list[float] = []
    odds: list[float] = []
    for tree in full:
        node_of: list[int] = []
        left = _left(tree)
        for token, parent, prob, origin in zip(
            tree.token_ids, tree.parents, tree.accept_probs, tree.origins, strict=True
        ):
            above = node_of[parent] if parent >= 0 else ROOT
            share = prob / left[parent]
            node = index.setdefault((above, token), len(odds))
            node_of.append(node)
            if node == len(odds):
                merged.token_ids.append(token)
                merged.parents.append(above)
                merged.origins.append(origin)
                merged.claims.append([])
                surest.append(prob)
                odds.append(share)
            else:
                odds[node] += share
                if prob > surest[node]:
                    surest[node], merged.origins[node] = prob, origin
            merged.claims[node].append((origin, prob))
    merged.accept_probs = _shared_out(odds, merged.parents)
    return merged


def _left(tree: DraftTree) -> list[float]:
    """By parent, what a tree's estimates leave to other tokens; the last place is that of ROOT."""
    left = [1.0] * (len(tree) + 1)
    for parent, prob in zip(tree.parents, tree.accept_probs, strict=True):
        left[parent] -= prob
    return [max(rest, LEAST_LEFT) for rest in left]


def _shared_out(odds: Sequence[float], parents: Sequence[int]) -> list[float]:
    """Probabilities of nodes from their odds against tokens that were not drafted there."""
    total = [1.0] * (len(odds) + 1)  # by parent; the last place is that of ROOT, which is -1
    for parent, each in zip(parents, odds, strict=True):
        total[parent] += each
    return [each / total[parent] for parent, each in zip(parents, odds, strict=True)]
