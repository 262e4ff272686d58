"""The draft nodes of a step that are worth their time.

:func:`choose_nodes` maximises ``sum of path probabilities - rate x extra time``. A step's time
depends on how many nodes it has, not on which, so the best nodes of every count are the likeliest
ones. Kernels have cliffs in both directions, so every count is looked at, up to where no further
one can be better. ``csrc/drafts/plan.h`` chooses the same to the last bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from paceline.request.span import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What one request may use in one step."""

    max_nodes: int  # draft nodes; with 0 it decodes plainly
    max_depth: int  # tokens along a path
    min_path_prob: float = 0.0  # nodes that are less likely to be reached and accepted are left out
    is_forced: bool = False  # the request asked for drafts of this depth, whether they pay or not


RankedNode = tuple[float, int, int]
"""Minus the path probability, request, node: in this order nodes are ranked."""


def choose_nodes(
    trees: Sequence[DraftTree],
    limits: Sequence[DraftLimits],
    growth: Sequence[float],
    rate: float,
    *,
    slowdown: float | None = None,
    ahead: Sequence[float] | None = None,
    node_budget: int,
) -> list[list[int]]:
    """Choose the nodes to verify.

    Forced requests get their likeliest nodes first, whatever they cost. Ties go to the lower
    request, then to the lower node; of equally good counts the lowest is taken.

    Args:
        trees: one per request that decodes, empty where nothing was drafted, with calibrated
            ``accept_probs`` in 0..1; ``limits`` are parallel.
        growth: milliseconds of the step with 0, 1, 2, ... draft nodes over all requests. More
            nodes than it has times for are only taken when forced.
        rate: what a millisecond is worth, in tokens; at least 0.
        slowdown: share of its tokens per time that a request may lose to the nodes of others.
            Counts at which any loses more are left out, unless the step is then no longer than with
            the forced nodes alone. None is no limit.
        ahead: tokens that each request gains besides its nodes, or lacks where it is negative.
        node_budget: most draft nodes over all requests, forced ones included.

    Returns:
        For each request its nodes, prefix-closed, the best path first.
    """
    forced: list[Iterator[RankedNode]] = []
    wanted: list[Iterator[RankedNode]] = []
    most = 0
    for request, (tree, limit) in enumerate(zip(trees, limits, strict=True)):
        if tree.token_ids and limit.max_nodes > 0:
            ranked = _ranked(tree, limit, request)
            (forced if limit.is_forced else wanted).append(ranked)
            most += min(len(tree.token_ids), limit.max_nodes)
    taken = list(islice(heapq.merge(*forced), max(0, node_budget)))
    most = min(most, node_budget, len(growth) - 1)
    if len(taken) < most:
        gains = list(ahead) if ahead else [0.0] * len(trees)
        _extend(taken, gains, heapq.merge(*wanted), growth[: most + 1], rate, slowdown)
    chosen: list[list[int]] = [[] for _ in trees]
    for _, request, node in taken:
        chosen[request].append(node)
    return [_in_order(tree, nodes) for tree, nodes in zip(trees, chosen, strict=True)]


def _ranked(tree: DraftTree, limit: DraftLimits, request: int) -> Iterator[RankedNode]:
    """The nodes that the limits allow, likeliest first: a parent before its children."""
    probs = tree.path_probs()
    order = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)
    if not limit.is_forced:
        order = [node for node in order if probs[node] >= limit.min_path_prob]
    if limit.max_depth < len(probs):
        depths = tree.depths()
        order = [node for node in order if depths[node] <= limit.max_depth]
    return ((-probs[i], request, i) for i in order[: limit.max_nodes])


def _extend(
    taken: list[RankedNode],
    gains: list[float],
    candidates: Iterable[RankedNode],
    growth: Sequence[float],
    rate: float,
    slowdown: float | None,
) -> None:
    """Append to the forced nodes those that pay, by the best of all counts."""
    for minus_prob, request, _ in taken:
        gains[request] -= minus_prob
    plain, longest, count = growth[0], growth[len(taken)], len(taken)
    # prices[n]: what a node of any larger count costs at least, averaged over all of that count.
    costs = [rate * (growth[n] - plain) / n for n in range(len(growth) - 1, 0, -1)]
    prices = list(accumulate(costs, min))[::-1]
    value, best = 0.0, -rate * (longest - plain)
    ahead = zip(candidates, prices[count:], growth[count + 1 :], strict=False)
    for n, (candidate, price, time) in enumerate(ahead, start=count + 1):
        value -= candidate[0]
        # No later node is likelier. Where this one is below the price, so are they, and the next
        # count is at that price better than any larger one.
        if value - price * n <= best and -candidate[0] <= price:
            break
        taken.append(candidate)
        gains[candidate[1]] -= candidate[0]
        total = value - rate * (time - plain)
        if total > best and (
            slowdown is None
            or time <= longest
            or (1.0 + min(gains)) * plain >= (1.0 - slowdown) * time
        ):
            best, count = total, n
    del taken[count:]


def _in_order(tree: DraftTree, nodes: list[int]) -> list[int]:
    if tree.is_chain:  # whose ranked nodes are in order
        return nodes
    return best_path_first(tree, sorted(nodes))


def best_path_first(tree: DraftTree, nodes: Sequence[int]) -> list[int]:
    """Order prefix-closed ``nodes``: the likeliest path first, parents before children.

    The path that is usually accepted then needs no move in the KV cache.
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


def cheapest_ahead(growth: Sequence[float]) -> list[float]:
    """By node count: what a node costs up to the further count where nodes are cheapest, in ms.

    These are the slopes of the lower convex hull of what is ahead in a step's ``growth``.
    """

    def slope(begin: int, end: int) -> float:
        return (growth[end] - growth[begin]) / (end - begin)

    slopes = [0.0] * len(growth)
    hull = [len(growth) - 1]
    for n in range(len(growth) - 2, -1, -1):
        while len(hull) > 1 and slope(n, hull[-2]) <= slope(n, hull[-1]):
            hull.pop()
        slopes[n] = max(0.0, slope(n, hull[-1]))
        hull.append(n)
    if len(slopes) > 1:
        slopes[-1] = slopes[-2]
    return slopes
