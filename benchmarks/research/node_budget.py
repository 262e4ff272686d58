"""A planner with a fixed number of nodes, and how well what it chose by was calibrated.

All proposers draft, estimates are calibrated and merged as the planner of an engine has them, and
the likeliest nodes are verified whatever they cost. Knows no proposer and no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

from paceline.planner.choice import DraftLimits
from paceline.planner.drafts import Drafts
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree
from paceline_lab.simulate.replay import AskingAll

LEAST_LOSS_PROB = 0.001
"""A certainty that turns out wrong costs as much as this probability would."""
NUM_BINS = 10
Labels = Iterable[tuple[float, bool]]
"""Estimates of nodes, and whether each was accepted."""


def scores(labels: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Expected calibration error, log-loss per label, and the reliability diagram.

    A bin is a list of its count, its mean estimate and the accepted share; empty ones are left out.
    """
    loss, bins = 0.0, [[0, 0.0, 0] for _ in range(NUM_BINS)]
    for estimate, accepted in labels:
        loss -= log(max(estimate if accepted else 1.0 - estimate, LEAST_LOSS_PROB))
        in_bin = bins[min(int(estimate * NUM_BINS), NUM_BINS - 1)]
        for at, value in enumerate((1, estimate, accepted)):
            in_bin[at] += value
    error = sum(abs(expected - right) for _, expected, right in bins)
    return {
        "calibration_error": error / len(labels),
        "log_loss": loss / len(labels),
        "bins": [[count, total / count, right / count] for count, total, right in bins if count],
    }


@dataclass(slots=True)
class Reliability:
    """Estimates, and what became of their nodes."""

    labels: list[tuple[float, bool]] = field(default_factory=list)

    def add(self, labels: Labels) -> None:
        self.labels += labels

    def ratios(self) -> dict[str, Any]:
        """The number of labels and, where there are some, their scores."""
        found = scores(self.labels) if self.labels else {}
        return {"labels": len(self.labels), **found}


class NodeBudget(AskingAll):
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
        self._drafted: dict[int, tuple[DraftTree, list[DraftTree]]] = {}
        """Of each request the merged tree, and those of its proposers."""

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        self._drafted = {
            request.request_id: (
                self.drafts.tree(index),
                [replace(tree) for tree in self.drafts.trees(index)],
            )
            for index, request in enumerate(self._requests)
        }
        wide = [replace(each, max_nodes=self._nodes, min_path_prob=0.0) for each in limits]
        return super().choose(wide, node_budget)

    def observe(self, request: Request, result: VerifyResult) -> None:
        tree, parts = self._drafted.get(request.request_id, (None, []))
        if not tree:
            return
        for part in parts:
            own = self.own.setdefault(part.origins[0], Reliability())
            own.add(_labels(as_if_verified(part, result)))
        whole = as_if_verified(tree, result)
        self.chosen_by.add(_labels(whole))
        self.drafts.learn(request.request_id, whole.token_ids)

    def finish(self, request: Request) -> None:
        self.drafts.finish(request.request_id)


def as_if_verified(tree: DraftTree, result: VerifyResult) -> VerifyResult:
    """What verification would have said, had all that was drafted been verified.

    The target's tokens do not depend on that, so every node below the emitted path is labelled.
    """
    tokens = result.token_ids
    path = [0, *[node + 1 for node in tree.follow(tokens[:-1])]]
    return VerifyResult(path, tokens[: len(path)], (), tree)


def _labels(result: VerifyResult) -> Iterator[tuple[float, bool]]:
    for node, accepted in result.draft.outcomes(result.token_ids):
        yield result.draft.accept_probs[node], accepted
