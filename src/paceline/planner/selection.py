"""Parts of draft trees, and what trees promise. Pure functions; they decide nothing."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.request.request import NO_DRAFT
from paceline.request.span import ROOT, DraftTree


def expected_tokens(drafts: Sequence[DraftTree]) -> float:
    """The most tokens that one of several drafts of a request is expected to bring."""
    most = 0.0
    for tree in drafts:
        total = 0.0
        for prob in tree.path_probs():  # from Python 3.12 on sum() rounds otherwise than C++
            total += prob
        most = max(most, total)
    return most


def selected(tree: DraftTree, nodes: list[int]) -> DraftTree:
    """The tree of these nodes, which is the tree itself where they are all of it in order."""
    count = len(nodes)
    if not count:
        return NO_DRAFT
    if nodes != list(range(count)):
        return tree.select(nodes)
    if count == len(tree.token_ids):
        return tree
    return DraftTree(
        tree.token_ids[:count],
        tree.parents[:count],
        tree.accept_probs[:count],
        tree.origins[:count],
        tree.claims[:count],
    )


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
