"""The drafts of a step: each estimated anew, merged into one tree per request, chosen from.

Of all nodes :mod:`paceline.planner.choice` takes those that pay, and what the target emitted
teaches the estimates. Requests are known by their place in the step. The native ``Drafts`` does the
same to the last bit, and drafts from texts without leaving C++. :class:`Prices` tell a proposer
when to stop drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.errors import ProposerError
from paceline.planner.acceptance import Calibration
from paceline.planner.choice import DraftLimits, choose_nodes
from paceline.request.request import NO_DRAFT
from paceline.request.span import ROOT, DraftTree

Drafted = tuple[list[int], list[int], list[float]]
"""Tokens, parents and probabilities of a tree's nodes."""


class TextDrafter(Protocol):
    """Drafts for one text, which only grows, and keeps what it has read of it."""

    def draft(self, token_ids: list[int], max_nodes: int, max_depth: int) -> Drafted:
        """A draft below the text's last token, within limits of at least one node and level."""
        ...


Member = tuple[str, int, int, Sequence[TextDrafter | None]]
"""A proposer's name, its most nodes and depth, and what drafts for each text; None for none."""


class Drafts:
    """The drafts of one step after another, and what is learnt of them.

    Args:
        calibrates: estimate trees anew; otherwise their proposers' estimates are taken.
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
        """What was added for a request, with its estimates. The native drafts do not show it."""
        return self._trees[index]

    def expected(self, index: int) -> float:
        """The most tokens that one of a request's drafts is expected to bring."""
        most = 0.0
        for tree in self._trees[index]:
            total = 0.0
            for prob in tree.path_probs():  # from Python 3.12 on sum() rounds otherwise than C++
                total += prob
            most = max(most, total)
        return most

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
        """Choose nodes in place of those that were chosen before; returns how many they are.

        The arguments are those of :func:`~paceline.planner.choice.choose_nodes`.
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
        """Tokens that a source's chosen nodes promise some requests beyond ``price`` per node."""
        gain = 0.0
        for index in indices:
            tree = self.tree(index)
            probs = tree.path_probs()
            for node in self._chosen[index]:
                if self._sources[tree.origins[node]] == source:
                    gain += probs[node] - price
        return gain

    def estimate(self, request_id: int, origin: str, depth: int, prob: float) -> float:
        """Probability that a node is accepted once its parent is, by its proposer's ``prob``.

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


def selected(tree: DraftTree, nodes: list[int]) -> DraftTree:
    """The tree of these nodes, which is the tree itself where they are all of it in order."""
    if not nodes:
        return NO_DRAFT
    return tree if nodes == list(range(len(tree))) else tree.select(nodes)


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """One tree out of several of the same request.

    Children of one node that carry the same token become one, with the origin of the surest
    proposer. Estimates become odds against what their proposers leave to tokens that they did not
    draft there. These are added, and turned back so that siblings sum to less than 1.
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
            node = index.setdefault((above, token), len(odds))
            node_of.append(node)
            if node == len(odds):
                merged.token_ids.append(token)
                merged.parents.append(above)
                merged.origins.append(origin)
                merged.claims.append([])
                surest.append(prob)
                odds.append(0.0)
            odds[node] += prob / left[parent]
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
    return [max(rest, 0.001) for rest in left]  # which keeps odds finite


def _shared_out(odds: Sequence[float], parents: Sequence[int]) -> list[float]:
    """Probabilities of nodes from their odds against tokens that were not drafted there."""
    total = [1.0] * (len(odds) + 1)  # by parent; the last place is that of ROOT, which is -1
    for parent, odd in zip(parents, odds, strict=True):
        total[parent] += odd
    return [odd / total[parent] for parent, odd in zip(parents, odds, strict=True)]


@dataclass(frozen=True, slots=True)
class Prices:
    """What further drafting must promise, in expected tokens."""

    nodes: Sequence[float] = ()
    """By the number of draft nodes that the step has: the price of verifying one more, at the
    further count where nodes are cheapest. Empty: nothing."""
    level: float = 0.0  # the price of drafting one more level for all requests together
    estimate: Callable[[int, int, float], float] = lambda index, depth, prob: prob
    """By a request's place in the list given to the proposer, a depth and the proposer's own
    estimate: the probability that the node is accepted once its parent is, or infinity where a
    request demands drafts whatever they cost."""

    def are_met(self, promises: Sequence[tuple[int, Sequence[float]]]) -> list[bool]:
        """For which requests another level is worth drafting.

        Its tokens are taken to be as likely as those on the way there.

        Args:
            promises: of each request its place in the list given to the proposer, and the
                proposer's own estimates on the way down to the likeliest node of its last level.
        """
        if not self.nodes:
            return [True] * len(promises)
        count = sum(len(path) for _, path in promises)
        price = self.nodes[min(count, len(self.nodes) - 1)]
        surplus = [
            self._reached(index, path) ** (1 + 1 / len(path)) - price for index, path in promises
        ]
        pays = sum(max(0.0, more) for more in surplus) > self.level
        return [pays and more > 0.0 for more in surplus]

    def _reached(self, index: int, path: Sequence[float]) -> float:
        """How likely all nodes of a path are accepted."""
        product = 1.0
        for depth, prob in enumerate(path, 1):
            product *= self.estimate(index, depth, prob)
        return product


FREE = Prices()
