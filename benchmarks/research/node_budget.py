"""A planner with a fixed number of nodes, and how well what it chose by was calibrated.

Everybody drafts, estimates are calibrated and merged as the planner of an engine has them, and the
likeliest nodes are verified whatever they cost. Knows no proposer and no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

from paceline.policy.acceptance import Calibration
from paceline.policy.cost_points import StepShape
from paceline.policy.planner import DraftLimits, Drafts, FixedPlanner, Source
from paceline.request import Request, VerifyResult
from paceline.span import DraftTree
from paceline.workbench.estimators_log import as_if_verified

NUM_BINS = 10
LEAST_LOSS_PROB = 0.001


@dataclass(slots=True)
class Reliability:
    """Estimates and what became of their nodes, by tenths of the estimate.

    Attributes:
        bins: labels, the sum of their estimates, and how many were accepted.
        loss: sum of the log-loss, in nats.
    """

    bins: list[list[float]] = field(default_factory=lambda: [[0, 0.0, 0] for _ in range(NUM_BINS)])
    loss: float = 0.0

    def add(self, estimate: float, accepted: bool) -> None:
        found = self.bins[min(int(estimate * NUM_BINS), NUM_BINS - 1)]
        found[0] += 1
        found[1] += estimate
        found[2] += accepted
        self.loss -= log(max(estimate if accepted else 1.0 - estimate, LEAST_LOSS_PROB))

    def join(self, other: Reliability) -> None:
        """Count what another has counted too."""
        self.loss += other.loss
        for mine, theirs in zip(self.bins, other.bins, strict=True):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]

    def ratios(self) -> dict[str, Any]:
        """Expected calibration error, log-loss per label, and the reliability diagram."""
        count = sum(found[0] for found in self.bins)
        if not count:
            return {"labels": 0}
        off = sum(abs(estimates - accepted) for _, estimates, accepted in self.bins)
        return {
            "labels": count,
            "calibration_error": off / count,
            "log_loss": self.loss / count,
            "bins": [[n, said / n, was / n] for n, said, was in self.bins if n],
        }


class NodeBudget(FixedPlanner):
    """See the module's docstring.

    Args:
        nodes: most of a request's draft in a step.

    Attributes:
        own: of the estimates that each proposer has for its nodes, by its name.
        chosen_by: of the estimates that nodes are chosen by.
    """

    def __init__(self, nodes: int) -> None:
        self.own: dict[str, Reliability] = {}
        self.chosen_by = Reliability()
        self._nodes = nodes
        self._calibration = Calibration()
        self._requests: Sequence[Request] = ()
        self._trees: dict[int, list[DraftTree]] = {}
        self._merged: dict[int, DraftTree] = {}

    def begin(self, step: StepShape, requests: Sequence[Request]) -> bool:
        self._requests = requests
        self._trees = {request.request_id: [] for request in requests}
        self._merged = {}
        return True

    def ask(self, source: Source, candidates: Sequence[int], drafts: Drafts) -> list[int]:
        return list(candidates)

    def drafted(
        self, source: Source, chosen: Sequence[int], trees: Sequence[DraftTree], milliseconds: float
    ) -> None:
        for index, tree in zip(chosen, trees, strict=True):
            if len(tree):
                request_id = self._requests[index].request_id
                self._calibration.calibrate(request_id, tree)
                self._trees[request_id].append(tree)

    def choose(
        self, trees: Sequence[DraftTree], limits: Sequence[DraftLimits], node_budget: int
    ) -> list[DraftTree]:
        for request, tree in zip(self._requests, trees, strict=True):
            self._merged[request.request_id] = tree
        wide = [replace(each, max_nodes=self._nodes, min_path_prob=0.0) for each in limits]
        return super().choose(trees, wide, node_budget)

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
        self._calibration.observe(request.request_id, result)

    def finish(self, request: Request) -> None:
        self._calibration.finish(request.request_id)


def _judged(result: VerifyResult) -> Iterator[tuple[float, bool]]:
    for node, accepted in result.draft.outcomes(result.token_ids):
        yield result.draft.accept_probs[node], accepted
