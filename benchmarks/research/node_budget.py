"""A planner with a fixed number of nodes, and how well what it chose by was calibrated.

Everybody drafts, estimates are calibrated and merged as the planner of an engine has them, and the
likeliest nodes are verified whatever they cost. Knows no proposer and no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from research.scores import Outcome, Recorder, as_if_verified, score

from paceline.planner.choice import DraftLimits
from paceline.planner.drafts import Drafts
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree


@dataclass(slots=True)
class Reliability:
    """Estimates, and what became of their nodes."""

    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, estimate: float, accepted: bool) -> None:
        self.outcomes.append(Outcome(0, estimate, accepted))

    def join(self, other: Reliability) -> None:
        """Count what another has counted too."""
        self.outcomes += other.outcomes

    def ratios(self) -> dict[str, Any]:
        """Expected calibration error, log-loss per label, and the reliability diagram."""
        if not self.outcomes:
            return {"labels": 0}
        found = score(self.outcomes).to_dict()
        kept = ("calibration_error", "log_loss", "bins")
        return {"labels": found["count"], **{name: found[name] for name in kept}}


class NodeBudget(Recorder):
    """See the module's docstring.

    Args:
        nodes: most of a request's draft in a step.

    Attributes:
        own: of the estimates that each proposer has for its nodes, by its name.
        chosen_by: of the estimates that nodes are chosen by.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.own: dict[str, Reliability] = {}
        self.chosen_by = Reliability()
        self._nodes = nodes
        self.drafts = Drafts()
        self._merged: dict[int, DraftTree] = {}

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        for index, request in enumerate(self._requests):
            self._merged[request.request_id] = self.drafts.tree(index)
        wide = [replace(each, max_nodes=self._nodes, min_path_prob=0.0) for each in limits]
        return super().choose(wide, node_budget)

    def observe(self, request: Request, result: VerifyResult) -> None:
        tree = self._merged.get(request.request_id)
        if tree is None or not len(tree):
            return
        result = as_if_verified(tree, result)
        for each in self._trees[request.request_id]:
            own = self.own.setdefault(each.origins[0], Reliability())
            for estimate, accepted in _judged(as_if_verified(each, result)):
                own.add(estimate, accepted)
        for estimate, accepted in _judged(result):
            self.chosen_by.add(estimate, accepted)
        self.drafts.learn(request.request_id, result.token_ids)

    def finish(self, request: Request) -> None:
        self.drafts.finish(request.request_id)


def _judged(result: VerifyResult) -> Iterator[tuple[float, bool]]:
    for node, accepted in result.draft.outcomes(result.token_ids):
        yield result.draft.accept_probs[node], accepted
