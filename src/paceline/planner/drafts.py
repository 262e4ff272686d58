"""What was drafted for the requests of a step: estimated, made one tree each, chosen from.

Each tree that is added is estimated anew by what was learnt of its proposer; the trees of one
request are merged; of all nodes of all requests those are chosen that pay; and what the target
emitted teaches the estimates. Requests are named by their place in the step. The native ``Drafts``
does the same to the last bit, and drafts from texts without leaving C++.

Owns the order of these parts; each is a module of its own. Knows no proposer and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.core.errors import ProposerError
from paceline.planner.acceptance import Calibration
from paceline.planner.choice import DraftLimits, choose_nodes
from paceline.planner.merging import merge
from paceline.planner.selection import expected_tokens, selected
from paceline.request.span import DraftTree

Drafted = tuple[list[int], list[int], list[float]]
"""Tokens, parents and probabilities of a tree's nodes."""


class TextDrafter(Protocol):
    """Drafts for one text, which only grows, and keeps what it has read of it."""

    def draft(self, token_ids: list[int], max_nodes: int, max_depth: int) -> Drafted:
        """A draft below the text's last token, of one node and level at most or more."""
        ...


Member = tuple[str, int, int, Sequence[TextDrafter | None]]
"""One proposer's name, its most nodes and depth, and what drafts for each text; None for none."""


class Drafts:
    """See the module's docstring.

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

        The arguments are those of :func:`~paceline.planner.choice.choose_nodes`.

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
