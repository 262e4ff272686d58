"""How ``paceline simulate --estimators`` shows estimators of acceptance. Computes no score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.commands.display import printable, table
from paceline.workbench.estimators import (
    AS_PROPOSED,
    KEPT,
    MAX_CALIBRATION_ERROR,
    Scores,
    best_of,
)

Compared = Mapping[str, Mapping[str, Scores]]
"""By proposer, then by estimator; empty for a proposer that drafted nothing."""


def texts(compared: Compared) -> list[str]:
    """Per proposer its estimators and the reliability diagram of the one that planners use."""
    found = ["acceptance as it is estimated, each node before the answer is known; * is the best"]
    for name, scores in compared.items():
        found += _texts(printable(name), scores) if scores else [f"{name} drafted nothing"]
    return found


def _texts(name: str, scores: Mapping[str, Scores]) -> list[str]:
    best, kept = best_of(scores), scores[KEPT]
    lines = [
        {
            "estimator": f"{estimator} (what planners use)" if estimator == KEPT else estimator,
            "log-loss": f"{'* ' if estimator == best else ''}{each.log_loss:.4f}",
            "Brier score": f"{each.brier:.4f}",
            "calibration error": f"{each.calibration_error:.3f}",
        }
        for estimator, each in scores.items()
    ]
    bins = [
        {"estimated": f"{b.estimate:.2f}", "accepted": f"{b.accepted:.2f}", "labels": str(b.count)}
        for b in kept.bins
    ]
    met = "met" if kept.calibration_error <= MAX_CALIBRATION_ERROR else "not met"
    return [
        f"{name}: {kept.count} labelled nodes, log-loss in nats\n{table(lines)}",
        f"{name}: reliability of the {KEPT}\n{table(bins)}\n"
        f"calibration error {kept.calibration_error:.3f}, at most {MAX_CALIBRATION_ERROR:g} is "
        f"aimed at: {met}; with so many labels chance alone makes {kept.error_by_chance:.3f}",
    ]


def document(compared: Compared) -> dict[str, Any]:
    """The same with the bins of every estimator, for ``--json``."""
    return {
        name: {
            "num_labels": scores[KEPT].count,
            "best": best_of(scores),
            "kept": KEPT,
            "calibration_error_target": MAX_CALIBRATION_ERROR,
            "calibration_error_by_chance": scores[KEPT].error_by_chance,
            "scores": {estimator: each.to_dict() for estimator, each in scores.items()},
        }
        if scores
        else {"num_labels": 0}
        for name, scores in compared.items()
    }


def panels(compared: Compared) -> dict[str, dict[str, Scores]]:
    """What is drawn: for every proposer that drafted its own estimates and what becomes of them."""
    return {
        name: {estimator: scores[estimator] for estimator in (AS_PROPOSED, KEPT)}
        for name, scores in compared.items()
        if scores
    }
