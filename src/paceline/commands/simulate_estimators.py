"""``paceline simulate --estimators``: how acceptance is estimated, shown and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.commands.display import Screen, printable, table
from paceline.workbench.estimators import KEPT, Scores, arms_of, best_of, compared
from paceline.workbench.plots import plot_reliability
from paceline.workbench.simulate import Configs, Simulator


def show_estimators(
    simulator: Simulator, configs: Configs, plot: str | None, screen: Screen
) -> dict[str, Any]:
    """Score the estimators by proposer, and show them; returns what JSON says of them.

    Args:
        plot: the file to draw reliability diagrams into.

    Raises:
        PacelineError: as a replay, or the file cannot be written.
    """
    with screen.progress("estimating", len(arms_of(configs))) as advance:
        found = compared(simulator, configs, advance)
    screen.say("\nacceptance as it is estimated, before the answer is known; * is the best")
    for name, scores in found.items():
        said = scores_table(scores) if scores else "drafted nothing"
        screen.say(f"\n{printable(name)}: {said}")
    panels = {name: scores for name, scores in found.items() if scores}
    if plot is not None and panels:
        plot_reliability(panels, plot)
    return {
        name: {estimator: each.to_dict() for estimator, each in scores.items()}
        for name, scores in found.items()
    }


def scores_table(scores: Mapping[str, Scores]) -> str:
    """Of one proposer that drafted something."""
    best = best_of(scores)
    rows = [
        {
            "estimator": f"{estimator} (what planners use)" if estimator == KEPT else estimator,
            "log-loss": f"{'* ' if estimator == best else ''}{each.log_loss:.4f}",
            "Brier score": f"{each.brier:.4f}",
            "calibration error": f"{each.calibration_error:.3f}",
        }
        for estimator, each in scores.items()
    ]
    return f"{scores[best].count} labelled nodes, log-loss in nats\n{table(rows)}"
