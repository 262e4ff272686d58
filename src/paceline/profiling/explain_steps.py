"""A planned step as a record, and what the records of a run come to.

A record says what was drafted, what of it was cut and why, and what came of it;
:mod:`paceline.profiling.explain` finds that out. The summaries say per proposer how well it was
calibrated, and how costs were met: they count, and every ratio is derived. Knows no text and no
screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.planner.cost_table import StepShape


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
    """

    request_id: int
    position: int
    token_ids: Sequence[int]
    nodes: Sequence[Node] = ()


@dataclass(slots=True)
class Asked:
    """A proposer in a step.

    Attributes:
        num_asked, num_passed_over: requests for which it was to draft, and for which it was found
            not to pay.
        node_price, level_price: expected tokens that the first node, and each level, must bring.
        milliseconds: of its drafting.
        num_nodes: that it drafted, over all requests.
    """

    origin: str
    num_asked: int
    num_passed_over: int
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
        disk_bytes, disk_ms: of weights that came from disk since the step before, and the time that
            the forward waited for them.
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
    disk_bytes: int = 0
    disk_ms: float = 0.0

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
        worths = [node.path_prob for node in self.nodes if node.cut is Cut.COST]
        is_fairness = any(node.cut is Cut.FAIRNESS for node in self.nodes)
        if is_fairness or not worths or after >= len(self.growth):
            return None
        return max(worths), self.rate * (self.growth[after] - self.growth[after - 1])


@dataclass(slots=True)
class ProposerSummary:
    """One proposer over all steps, or several that are asked together.

    Attributes:
        num_asked, num_passed_over: requests, counted once per step.
        milliseconds: of drafting.
        num_drafted: nodes, before what two proposers both drafted was merged.
        num_candidates, num_verified, num_accepted: nodes, counted where it was the surest.
        num_labelled, num_right: of the candidates, those whose truth is known, and that were right.
        expected: of the labelled ones, as many as were estimated to be right.
    """

    origin: str
    num_asked: int = 0
    num_passed_over: int = 0
    milliseconds: float = 0.0
    num_drafted: int = 0
    num_candidates: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_labelled: int = 0
    num_right: int = 0
    expected: float = 0.0


def summarise(records: Sequence[StepRecord]) -> list[ProposerSummary]:
    """One summary per proposer and group, in the order in which they were first considered."""
    found: dict[str, ProposerSummary] = {}
    for record in records:
        for asked in record.asks:
            summary = found.setdefault(asked.origin, ProposerSummary(asked.origin))
            summary.num_asked += asked.num_asked
            summary.num_passed_over += asked.num_passed_over
            summary.milliseconds += asked.milliseconds
            summary.num_drafted += asked.num_nodes
    nodes = [node for record in records for node in record.nodes]
    for node in nodes:  # those that draft from texts are asked together
        found.setdefault(node.origin, ProposerSummary(node.origin))
    for origin, summary in found.items():
        own = [node for node in nodes if node.origin == origin]
        summary.num_candidates = len(own)
        summary.num_verified = sum(node.cut is None for node in own)
        summary.num_accepted = sum(node.is_accepted for node in own)
        labelled = [node for node in own if node.is_right is not None]
        summary.num_labelled = len(labelled)
        summary.num_right = sum(node.is_right is True for node in labelled)
        summary.expected = sum(node.accept_prob for node in labelled)
    return list(found.values())


def cost_error(records: Sequence[StepRecord]) -> float | None:
    """Median over steps of |predicted - measured| / measured forward time; None without any."""
    errors = sorted(
        abs(record.predicted_ms - record.forward_ms) / record.forward_ms
        for record in records
        if record.predicted_ms is not None and record.forward_ms > 0.0
    )
    return errors[len(errors) // 2] if errors else None
