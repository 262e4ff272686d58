"""What the steps of a run come to: per proposer, how well it was calibrated, how costs were met.

Counts; every ratio is derived. Knows no text and no screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.workbench.explain_steps import Asked, Node, StepRecord

NUM_BINS = 10


@dataclass(slots=True)
class Bin:
    """Nodes whose estimate lies in one tenth of 0..1 and of which the target's token is known."""

    count: int = 0
    num_right: int = 0
    expected: float = 0.0

    @property
    def error(self) -> float:
        """How far estimates and truth are apart, summed over the nodes."""
        return abs(self.expected - self.num_right)


@dataclass(slots=True)
class ProposerSummary:
    """One proposer over all steps.

    Attributes:
        num_asked, num_passed_over: requests, counted once per step.
        milliseconds: of drafting.
        num_drafted: nodes, before what two proposers both drafted was merged.
        num_candidates, num_verified, num_accepted: nodes, counted where it was the surest.
        bins: reliability of its candidates' estimates.
    """

    origin: str
    num_asked: int = 0
    num_passed_over: int = 0
    milliseconds: float = 0.0
    num_drafted: int = 0
    num_candidates: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    bins: Sequence[Bin] = ()

    @property
    def num_labelled(self) -> int:
        return sum(each.count for each in self.bins)

    @property
    def num_right(self) -> int:
        return sum(each.num_right for each in self.bins)

    @property
    def expected(self) -> float:
        """Of the labelled nodes, as many as were estimated to be right."""
        return sum(each.expected for each in self.bins)

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: the mean over nodes of their bin's deviation."""
        labelled = self.num_labelled
        return sum(each.error for each in self.bins) / labelled if labelled else 0.0


def summarise(records: Sequence[StepRecord]) -> list[ProposerSummary]:
    """One summary per proposer, in the order in which they were first considered."""
    found: dict[str, ProposerSummary] = {}
    for record in records:
        for asked in record.asks:
            _add_asked(found.setdefault(asked.origin, ProposerSummary(asked.origin)), asked)
    nodes = [node for record in records for node in record.nodes]
    for origin, summary in found.items():
        own = [node for node in nodes if node.origin == origin]
        summary.num_candidates = len(own)
        summary.num_verified = sum(node.cut is None for node in own)
        summary.num_accepted = sum(node.is_accepted for node in own)
        summary.bins = reliability(own)
    return list(found.values())


def _add_asked(summary: ProposerSummary, asked: Asked) -> None:
    summary.num_asked += len(asked.asked)
    summary.num_passed_over += len(asked.passed_over)
    summary.milliseconds += asked.milliseconds
    summary.num_drafted += asked.num_nodes


def reliability(nodes: Iterable[Node]) -> list[Bin]:
    """:data:`NUM_BINS` bins of equal width over the labelled nodes, cut ones included."""
    bins = [Bin() for _ in range(NUM_BINS)]
    for node in nodes:
        if node.is_right is not None:
            each = bins[min(int(node.accept_prob * NUM_BINS), NUM_BINS - 1)]
            each.count += 1
            each.num_right += node.is_right
            each.expected += node.accept_prob
    return bins


def cost_error(records: Sequence[StepRecord]) -> float | None:
    """Median over steps of |predicted - measured| / measured forward time; None without any."""
    errors = sorted(
        abs(record.predicted_ms - record.forward_ms) / record.forward_ms
        for record in records
        if record.predicted_ms is not None and record.forward_ms > 0.0
    )
    return errors[len(errors) // 2] if errors else None
