"""What a proposer is, and how the trees of several become one. Knows no particular proposer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.config import SpeculativeConfig
from paceline.policy.acceptance import limit_siblings
from paceline.policy.prices import FREE, Prices
from paceline.request import Request, VerifyResult
from paceline.span import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """What the planner allows each request of a step to draft; lists parallel to the requests.

    Attributes:
        max_nodes: most nodes of the request's tree.
        max_depth: most tokens along one path (never more than the request may still emit, less the
            bonus token).
        prices: what further drafting must promise; a proposer whose drafting takes time stops
            where it does not.
    """

    max_nodes: Sequence[int]
    max_depth: Sequence[int]
    prices: Prices = FREE


class Proposer(Protocol):
    """Drafts continuations from token ids. Wrong drafts cost time, never correctness.

    A request is first seen in :meth:`propose` or :meth:`observe`, whichever comes first; a proposer
    keeps what it needs by ``request.request_id`` until :meth:`finish`.
    """

    name: str
    config: SpeculativeConfig
    """Limits of its drafts; the engine reads them too."""
    costs_forwards: bool
    """True when drafting takes forwards of a model, so that it is worth asking whether to."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        """One tree per request (possibly empty) below its last token."""
        ...

    def observe(self, request: Request, result: VerifyResult) -> None:
        """Learn what a step committed. ``request.token_ids`` holds it already."""
        ...

    def finish(self, request: Request) -> None:
        """Forget a request that ended or was preempted. Unknown requests are ignored."""
        ...

    def context_length(self, request: Request) -> int:
        """How many of the request's tokens this proposer has taken in or will before it drafts."""
        ...


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """One trie out of several trees of the same request.

    Children of one node that carry the same token become one, with the probability that at least
    one of the proposers is right were they independent, and the origin of the surest of them.
    Siblings' probabilities are then scaled to sum to at most 1.
    """
    full = [tree for tree in trees if len(tree)]
    if len(full) <= 1:
        return full[0] if full else DraftTree()
    merged = DraftTree()
    is_calibrated = all(tree.evidence for tree in full)
    index: dict[tuple[int, int], int] = {}
    surest: list[float] = []
    for tree in full:
        node_of: list[int] = []
        evidence = tree.evidence if is_calibrated else [0] * len(tree)
        for token, parent, prob, origin, key in zip(
            tree.token_ids, tree.parents, tree.accept_probs, tree.origins, evidence, strict=True
        ):
            above = node_of[parent] if parent >= 0 else ROOT
            node = index.get((above, token))
            if node is None:
                node = index[above, token] = len(merged)
                merged.token_ids.append(token)
                merged.parents.append(above)
                merged.accept_probs.append(prob)
                merged.origins.append(origin)
                merged.evidence.append(key)
                surest.append(prob)
            else:
                merged.accept_probs[node] = 1 - (1 - merged.accept_probs[node]) * (1 - prob)
                if prob > surest[node]:
                    surest[node], merged.origins[node] = prob, origin
                    merged.evidence[node] = key
            node_of.append(node)
    if not is_calibrated:
        merged.evidence = []
    limit_siblings(merged)
    return merged
