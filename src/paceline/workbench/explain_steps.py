"""A planned step as a record: what was drafted, what of it was cut and why, and what came of it.

Owns the records alone; :mod:`paceline.workbench.explain_cuts` finds out what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.policy.cost_points import StepShape


class Cut(StrEnum):
    """Why a candidate node was not verified."""

    DEPTH = "depth"
    """Deeper than the request may draft."""
    PROBABILITY = "probability"
    """Less likely to be reached and accepted than the proposers' least."""
    COUNT = "count"
    """The request, or the step, may not have so many nodes."""
    COST = "cost"
    """It does not bring what its time is worth."""
    FAIRNESS = "fairness"
    """It would pay, but make some request of the step too slow."""
    DROPPED = "dropped"
    """It was chosen, but there was no memory for it or the step was run again plainly."""


@dataclass(frozen=True, slots=True)
class Node:
    """A candidate node of a draft tree.

    Attributes:
        parent: place of its parent in the request's nodes, -1 below the last committed token.
        accept_prob: the planner's estimate that it is accepted, given that its parent is.
        path_prob: the product of these along its path.
        cut: why it was not verified; None where it was.
        is_right: whether the target emitted its token there; None where that is not known, because
            its parent was not accepted.
    """

    token_id: int
    parent: int
    depth: int
    origin: str
    accept_prob: float
    path_prob: float
    cut: Cut | None
    is_right: bool | None

    @property
    def is_accepted(self) -> bool:
        return self.cut is None and self.is_right is True


@dataclass(frozen=True, slots=True)
class RequestPart:
    """One request's part in a step.

    Attributes:
        position: tokens before the step, the prompt's included.
        token_ids: emitted by the step.
        nodes: candidates, parents first; empty where nothing was drafted.
        weight: what a token of this request counted in the choice.
    """

    request_id: int
    position: int
    token_ids: Sequence[int]
    nodes: Sequence[Node] = ()
    weight: float = 1.0


@dataclass(slots=True)
class Asked:
    """A proposer in a step; requests are named by their ids.

    Attributes:
        asked, passed_over: for whom it was to draft, and for whom it was found not to pay.
        node_price, level_price: expected tokens that the first node, and each level, must bring.
        milliseconds: of its drafting.
        num_nodes: that it drafted, over all requests.
    """

    origin: str
    costs_forwards: bool
    asked: list[int]
    passed_over: list[int]
    node_price: float = 0.0
    level_price: float = 0.0
    milliseconds: float = 0.0
    num_nodes: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the whole batch.

    Attributes:
        index: from 0, over all steps that were recorded.
        shape: of the forward that ran, draft nodes included.
        asks: proposers that had somebody to draft for; empty where nobody was to be asked.
        requests: that decoded.
        growth: milliseconds of the forward with 0, 1, 2, ... of the candidates, as predicted; empty
            where no cost was looked at.
        rate: tokens that a millisecond is worth.
        predicted_ms: of the forward that ran, before it ran; None where no cost was looked at.
        forward_ms, total_ms: as measured, of the forward and of the whole step.
        num_decoding, num_emitted: requests that decoded, and tokens that these emitted.
    """

    index: int
    shape: StepShape
    asks: Sequence[Asked]
    requests: Sequence[RequestPart]
    growth: Sequence[float]
    rate: float
    predicted_ms: float | None
    forward_ms: float
    total_ms: float
    num_decoding: int
    num_emitted: int

    @property
    def nodes(self) -> list[Node]:
        return [node for part in self.requests for node in part.nodes]

    @property
    def num_verified(self) -> int:
        return sum(node.cut is None for node in self.nodes)

    @property
    def num_accepted(self) -> int:
        return sum(node.is_accepted for node in self.nodes)

    @property
    def next_node(self) -> tuple[float, float] | None:
        """What one node more would bring and cost, in tokens, where that ended the choice."""
        after = self.num_verified + 1
        worths = [
            part.weight * node.path_prob
            for part in self.requests
            for node in part.nodes
            if node.cut is Cut.COST
        ]
        is_fairness = any(node.cut is Cut.FAIRNESS for node in self.nodes)
        if is_fairness or not worths or after >= len(self.growth):
            return None
        return max(worths), self.rate * (self.growth[after] - self.growth[after - 1])
