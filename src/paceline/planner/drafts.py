"""What was drafted for the requests of a step: estimated, made one tree each, chosen from.

Each tree that is added is estimated anew by what was learnt of its proposer; the trees of one
request are merged; of all nodes of all requests those are chosen that pay; and what the target
emitted teaches the estimates. Requests are named by their place in the step. The native ``Drafts``
does the same to the last bit, and drafts from texts without leaving C++.

:func:`choose_nodes` maximises ``sum of path probabilities - rate x extra time``. A step's time
depends on how many nodes it has, not on which, so the best nodes of every count are the likeliest
ones; and as kernels have cliffs both ways, every count is looked at, up to where no further one can
be better. By :class:`Prices` a proposer stops drafting by itself. Knows no proposer and no clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol

from paceline.core.errors import ProposerError
from paceline.planner.acceptance import Calibration
from paceline.request.request import NO_DRAFT
from paceline.request.span import ROOT, DraftTree

Drafted = tuple[list[int], list[int], list[float]]
"""Tokens, parents and probabilities of a tree's nodes."""


class TextDrafter(Protocol):
    """Drafts for one text, which only grows, and keeps what it has read of it."""

    def draft(self, token_ids: list[int], max_nodes: int, max_depth: int) -> Drafted:
        """A draft below the text's last token, of one node and level at most or more."""
        ...


Member = tuple[str, int, int, Sequence[TextDrafter | None]]
"""One proposer's name, its most nodes and depth, and what drafts for each text; None for none."""
LEAST_LEFT = 0.001
"""Who leaves less than this to other tokens is taken to leave so much."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What one request may use in one step.

    Attributes:
        max_nodes: draft nodes; 0 means that it decodes plainly.
        max_depth: tokens along a path.
        min_path_prob: nodes less likely to be reached and accepted than this are left out.
        is_forced: the request asked for drafts of this depth, whether they pay or not.
    """

    max_nodes: int
    max_depth: int
    min_path_prob: float = 0.0
    is_forced: bool = False


class Drafts:
    """The drafts of one step after another, and what is learnt of them.

    Args:
        calibrates: estimate trees anew; otherwise they are as their proposers estimate them.
    """

    def __init__(self, calibrates: bool = True) -> None:
        self.calibrates = calibrates
        self._calibration = Calibration()
        self._sources: dict[str, str] = {}  # by origin of a node: who drafted it
        self.begin(())

    def begin(self, request_ids: Sequence[int], adapters: Sequence[str | None] = ()) -> None:
        """A step of these requests begins; nothing is drafted yet.

        Args:
            adapters: their names, where any request has one.
        """
        self._ids = list(request_ids)
        for request_id, adapter in zip(self._ids, adapters, strict=False):
            if adapter is not None and self.calibrates:
                self._calibration.adapt(request_id, adapter)
        self._trees: list[list[DraftTree]] = [[] for _ in self._ids]
        self._merged: list[DraftTree | None] = [None] * len(self._ids)
        self._chosen: list[list[int]] = [[] for _ in self._ids]

    def add(self, index: int, source: str, tree: DraftTree) -> None:
        """Take in what a source has drafted for a request: a tree with estimates in 0..1."""
        if not tree.token_ids:
            return
        if self.calibrates:
            self._calibration.calibrate(self._ids[index], tree)
        self._sources |= dict.fromkeys(tree.origins, source)
        self._trees[index].append(tree)
        self._merged[index] = None

    def draft(
        self,
        source: str,
        indices: Sequence[int],
        texts: Sequence[list[int]],
        limits: Sequence[DraftLimits],
        members: Sequence[Member],
        enough: float,
        vocab_size: int,
    ) -> None:
        """Let the members of a source draft below each text in turn, and take that in.

        Args:
            indices: of the requests; ``texts`` and ``limits`` are parallel.
            enough: expected tokens of a request's drafts at which no further member is asked.

        Raises:
            ProposerError: a token is not in the vocabulary.
        """
        for place, (index, text, limit) in enumerate(zip(indices, texts, limits, strict=True)):
            for name, most_nodes, most_depth, drafters in members:
                if self.expected(index) >= enough:
                    break
                drafter = drafters[place]
                nodes, depth = min(most_nodes, limit.max_nodes), min(most_depth, limit.max_depth)
                if drafter is None or not nodes or not depth:
                    continue
                tokens, parents, probs = drafter.draft(text, nodes, depth)
                if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                    raise ProposerError(f"{name} drafts a token that is not in the vocabulary")
                self.add(index, source, DraftTree(tokens, parents, probs, [name] * len(tokens)))

    def trees(self, index: int) -> Sequence[DraftTree]:
        """What was added for a request, as it was estimated. The native drafts do not show it."""
        return self._trees[index]

    def expected(self, index: int) -> float:
        """The most tokens that one of a request's drafts is expected to bring."""
        return expected_tokens(self._trees[index])

    def depth(self, source: str) -> int:
        """Levels of the deepest tree of a source; 1 where it drafted nothing."""
        trees = [t for of_request in self._trees for t in of_request]
        mine = [t for t in trees if self._sources[t.origins[0]] == source]
        return max([max(tree.depths()) for tree in mine], default=1)

    def sizes(self) -> list[int]:
        """Nodes of each request's tree."""
        return [len(self.tree(index)) for index in range(len(self._ids))]

    @property
    def num_merges(self) -> int:
        """Trees beyond the first of each request."""
        return sum([max(0, len(trees) - 1) for trees in self._trees])

    def tree(self, index: int) -> DraftTree:
        """All that was drafted for a request, as one tree."""
        tree = self._merged[index]
        if tree is None:
            tree = self._merged[index] = merge(self._trees[index])
        return tree

    def choose(
        self,
        limits: Sequence[DraftLimits],
        growth: Sequence[float],
        rate: float,
        *,
        slowdown: float | None = None,
        ahead: Sequence[float] | None = None,
        node_budget: int,
    ) -> int:
        """Choose the nodes that are worth their time, instead of those that were chosen before.

        The arguments are those of :func:`~paceline.planner.drafts.choose_nodes`.

        Returns:
            How many they are.
        """
        self._chosen = choose_nodes(
            [self.tree(index) for index in range(len(self._ids))],
            limits,
            growth,
            rate,
            slowdown=slowdown,
            ahead=ahead,
            node_budget=node_budget,
        )
        return sum(map(len, self._chosen))

    def chosen(self) -> list[DraftTree]:
        """For each request the tree of its chosen nodes, the best path first."""
        return [selected(self.tree(i), nodes) for i, nodes in enumerate(self._chosen)]

    def gain(self, source: str, indices: Sequence[int], price: float) -> float:
        """What a source's chosen nodes promise some requests beyond their price, in tokens each."""
        gain = 0.0
        for index in indices:
            tree = self.tree(index)
            probs = tree.path_probs()
            for node in self._chosen[index]:
                if self._sources[tree.origins[node]] == source:
                    gain += probs[node] - price
        return gain

    def estimate(self, request_id: int, origin: str, depth: int, prob: float) -> float:
        """How likely a node is to be accepted once its parent is, where its proposer says ``prob``.

        Siblings are not looked at.
        """
        return self._calibration.estimate(request_id, origin, depth, prob)

    def learn(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Learn from what the target emitted for a request of this step."""
        if self.calibrates and request_id in self._ids:
            tree = self.tree(self._ids.index(request_id))
            self._calibration.learn(request_id, tree, token_ids)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._calibration.finish(request_id)

    @property
    def num_requests(self) -> int:
        """Requests of which something was learnt that have not finished."""
        return self._calibration.num_requests

    @property
    def num_invalid(self) -> int:
        """Estimates that were not in 0..1, or no numbers."""
        return self._calibration.num_invalid


RankedNode = tuple[float, int, int]
"""Minus the path probability, request, node: the ranking."""


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
    """The draft nodes that are worth their time.

    Forced requests get their likeliest nodes first, whatever they cost. Ties go to the lower
    request, then to the lower node; of equally good counts the lowest is taken.

    Args:
        trees: one per request that decodes in the step, empty where nothing was drafted, with
            calibrated ``accept_probs`` in 0..1.
        limits: parallel to ``trees``.
        growth: milliseconds of the step with 0, 1, 2, ... draft nodes over all requests. More
            nodes than it has times for are only taken when forced.
        rate: what a millisecond is worth, in tokens; at least 0.
        slowdown: most of its tokens per time, against the step without drafts, that a request may
            lose to the others' nodes (0.04 is 4 %). Counts at which any loses more are left out,
            unless the step is then no longer than with the forced nodes alone. None is no limit.
        ahead: tokens that each request may be taken to gain besides its nodes, or lacks where it is
            negative; None is nothing.
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
    taken = list(islice(heapq.merge(*forced), max(0, node_budget))) if forced else []
    most = min(most, node_budget, len(growth) - 1)
    if len(taken) < most:
        candidates = wanted[0] if len(wanted) == 1 else heapq.merge(*wanted)
        gains = list(ahead) if ahead else [0.0] * len(trees)
        _extend(taken, gains, candidates, growth[: most + 1], rate, slowdown)
    chosen: list[list[int]] = [[] for _ in trees]
    for _, request, node in taken:
        chosen[request].append(node)
    return [_in_order(tree, nodes) for tree, nodes in zip(trees, chosen, strict=True)]


def _ranked(tree: DraftTree, limit: DraftLimits, request: int) -> Iterator[RankedNode]:
    """The nodes that the limits allow, likeliest first: a parent before its children."""
    probs = tree.path_probs()
    order = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)
    if not limit.is_forced and probs[order[-1]] < limit.min_path_prob:
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
    """The best path first. Ranked nodes of a chain are in that order."""
    if len(nodes) < 2 or tree.is_chain:
        return nodes
    return best_path_first(tree, sorted(nodes))


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


def expected_tokens(drafts: Sequence[DraftTree]) -> float:
    """The most tokens that one of several drafts of a request is expected to bring."""
    most = 0.0
    for tree in drafts:
        total = 0.0
        for prob in tree.path_probs():  # from Python 3.12 on sum() rounds otherwise than C++
            total += prob
        most = max(most, total)
    return most


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


@dataclass(frozen=True, slots=True)
class Prices:
    """What further drafting must promise, in expected tokens.

    Attributes:
        nodes: by how many draft nodes the step has already: of one more, the time in which the
            target verifies it, at the further count where nodes are cheapest. Empty: nothing.
        level: of one more level for all requests together: the time in which it is drafted.
        estimate: (place in the request list of the proposer, depth, its own estimate) to how
            likely the node is accepted once its parent is; infinite where a request asked for its
            drafts whatever they cost.
    """

    nodes: Sequence[float] = ()
    level: float = 0.0
    estimate: Callable[[int, int, float], float] = lambda index, depth, prob: prob

    def are_met(self, promises: Sequence[tuple[int, Sequence[float]]]) -> list[bool]:
        """For which requests another level is worth drafting.

        Nobody knows how likely its tokens are before they are drafted; they are taken to be as
        likely as those on the way there.

        Args:
            promises: of each request its place in the request list of the proposer, and the
                proposer's own estimates on the way down to the likeliest node of its last level.
        """
        if not self.nodes:
            return [True] * len(promises)
        count = sum(len(path) for _, path in promises)
        price = self.nodes[min(count, len(self.nodes) - 1)]
        surplus = [self._reached(*each) ** (1 + 1 / len(each[1])) - price for each in promises]
        pays = sum(max(0.0, more) for more in surplus) > self.level
        return [pays and more > 0.0 for more in surplus]

    def _reached(self, index: int, path: Sequence[float]) -> float:
        """How likely all nodes of a path are accepted."""
        product = 1.0
        for depth, prob in enumerate(path, 1):
            product *= self.estimate(index, depth, prob)
        return product


FREE = Prices()


def cheapest_ahead(growth: Sequence[float]) -> list[float]:
    """By node count: what each node up to the further count where they are cheapest costs, in ms.

    These are the slopes of the lower convex hull of what is ahead; never less than nothing.

    Args:
        growth: milliseconds of the step with 0, 1, 2, ... draft nodes.
    """
    slopes = [0.0] * len(growth)
    hull = [len(growth) - 1]
    for n in range(len(growth) - 2, -1, -1):
        while len(hull) > 1 and _slope(growth, n, hull[-2]) <= _slope(growth, n, hull[-1]):
            hull.pop()
        slopes[n] = max(0.0, _slope(growth, n, hull[-1]))
        hull.append(n)
    if len(slopes) > 1:
        slopes[-1] = slopes[-2]
    return slopes


def _slope(growth: Sequence[float], begin: int, end: int) -> float:
    return (growth[end] - growth[begin]) / (end - begin)
