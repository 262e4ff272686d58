"""How estimators of acceptance are shown: which is the best one."""

from __future__ import annotations

from paceline.commands.simulate_estimators import scores_table
from paceline.workbench.estimators import ESTIMATORS, Outcome, Scores, score


def scores_where(best: str, estimate: float = 0.9) -> dict[str, Scores]:
    """Half of the nodes are accepted; ``best`` says so, the others expect ``estimate``."""
    return {
        name: score(
            [Outcome(0, 0.5 if name == best else estimate, place % 2 == 0) for place in range(100)]
        )
        for name in ESTIMATORS
    }


def test_the_best_alone_is_marked() -> None:
    for best in ESTIMATORS:
        scores = scores_table(scores_where(best))
        (starred,) = [line for line in scores.splitlines() if "*" in line]
        assert starred.startswith(best)
        assert starred.split()[-3:] == ["0.6931", "0.2500", "0.000"]
        assert scores.startswith("100 labelled nodes")
