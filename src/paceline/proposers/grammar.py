"""Drafts what a request's grammar leaves. Knows no grammar library, no model and no text.

Where one token alone may follow it is certain. Where the grammar goes on with one string that
several tokens could begin, its usual spelling is likely. Where few tokens may follow, each is
tried, and what is certain below it; how likely they are is for the planner's calibration to learn.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence

from paceline.config.speculative import GrammarConfig
from paceline.proposers.base import DraftBudget, Proposer, TargetInfo
from paceline.request.request import Constraint, Request
from paceline.request.span import ROOT, DraftTree

log = logging.getLogger(__name__)
NAME = "grammar"
CERTAIN = 1.0
LIKELY = 0.8
"""Of the usual spelling of a string that is forced."""
MAX_ALTERNATIVES = 4

_Candidate = tuple[float, int, int, float, int, list[int]]
"""Minus the path probability, order, parent, probability, token, path down to the token."""


class GrammarProposer(Proposer):
    """See the module's docstring. It drafts for requests that carry a constraint."""

    name = NAME
    config: GrammarConfig

    def __init__(self, config: GrammarConfig) -> None:
        self.config = config
        self._drafts: dict[int, tuple[int, DraftTree]] = {}

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        limits = zip(requests, budget.max_nodes, budget.max_depth, strict=True)
        return [self._draft(request).within(*most) for request, *most in limits]

    def lag(self, request: Request) -> int | None:
        """None where the grammar leaves too much to draft anything."""
        return 0 if len(self._draft(request)) else None

    def finish(self, request: Request) -> None:
        self._drafts.pop(request.request_id, None)

    def _draft(self, request: Request) -> DraftTree:
        """The widest draft at the request's last token; it is made once."""
        if request.constraint is None:
            return DraftTree()
        length, tree = self._drafts.get(request.request_id, (0, DraftTree()))
        if length != len(request.token_ids):
            try:
                tree = self._grow(request.constraint)
            except Exception as error:  # verification meets it too, and fails the request
                log.debug("request %d: its grammar failed: %r", request.request_id, error)
                tree = DraftTree()
            self._drafts[request.request_id] = len(request.token_ids), tree
        return tree

    def _grow(self, constraint: Constraint) -> DraftTree:
        """Best-first, so that its first nodes are a tree too."""
        tree, heap = DraftTree(), list[_Candidate]()
        depth, most = self.config.num_speculative_tokens, self.config.tree_nodes
        order = iter(range(1 << 30))  # decides ties

        def push(parent: int, path_prob: float, path: list[int]) -> None:
            if len(path) < depth:
                tokens, prob = _next(constraint, path)
                for token in tokens:
                    entry = -path_prob * prob, next(order), parent, prob, token, [*path, token]
                    heapq.heappush(heap, entry)

        push(ROOT, 1.0, [])
        while heap and len(tree) < most:
            minus_prob, _, parent, prob, token, path = heapq.heappop(heap)
            if -minus_prob < self.config.min_accept_prob:
                break
            tree.token_ids.append(token)
            tree.parents.append(parent)
            tree.accept_probs.append(prob)
            tree.origins.append(NAME)
            push(len(tree) - 1, -minus_prob, path)
        return tree


def _next(constraint: Constraint, path: list[int]) -> tuple[list[int], float]:
    """Tokens worth trying below a path, and how likely each of them is."""
    token = constraint.certain(path)
    if token is not None:
        return [token], CERTAIN
    token = constraint.usual(path)
    if token is not None:
        return [token], LIKELY
    tokens = constraint.alternatives(path, MAX_ALTERNATIVES)
    return tokens, 1.0 / max(1, len(tokens))


def build(config: GrammarConfig, target: TargetInfo) -> GrammarProposer:
    return GrammarProposer(config)
