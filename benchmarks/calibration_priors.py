"""The priors of the planner's estimates, fitted to logs of drafts and what became of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from research.estimators import Node, NodeEstimator

from paceline.policy.evidence import AS_ESTIMATED, LEAST_DEPTHS
from paceline.workbench.estimators_log import Log, replay

RIDGE = 3.0
"""How many labels the assumption is worth that a proposer's estimates are right as they are."""
NEWTON_STEPS = 30


class _Labels(NodeEstimator):
    """Collects log-odds and outcomes by origin and range of depths."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, int], list[tuple[float, bool]]] = {}

    def learn(self, node: Node, estimate: float, accepted: bool) -> None:
        self.found.setdefault(node.place, []).append((node.logit, accepted))


def fit_priors(logs: Sequence[Log]) -> dict[str, list[tuple[float, float]]]:
    """Slope and intercept per origin and range of depths, as :mod:`paceline.policy.evidence` has.

    Args:
        logs: of one proposer each. A range of depths without labels goes by the one before it.
    """
    labels = _Labels()
    for drafts in logs:
        replay(drafts, labels)
    priors: dict[str, list[tuple[float, float]]] = {}
    for origin in sorted({origin for origin, _ in labels.found}):
        line, priors[origin] = AS_ESTIMATED[0], []
        for place in range(len(LEAST_DEPTHS)):
            found = labels.found.get((origin, place))
            line = _fit_line(found) if found else line
            priors[origin].append(line)
    return priors


def _fit_line(labels: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """Logistic regression by Newton's method, with a ridge towards the proposer's estimate."""
    x = np.asarray([(logit, 1.0) for logit, _ in labels])  # [n, 2]
    accepted = np.asarray([accepted for _, accepted in labels], dtype=float)
    prior = line = np.asarray(AS_ESTIMATED[0])
    for _ in range(NEWTON_STEPS):
        probs = 1.0 / (1.0 + np.exp(-x @ line))
        gradient = x.T @ (accepted - probs) - RIDGE * (line - prior)
        curvature = (x * (probs * (1.0 - probs))[:, None]).T @ x + RIDGE * np.eye(2)
        line = line + np.linalg.solve(curvature, gradient)
    slope, intercept = line.tolist()
    return slope, intercept
