"""How estimators of acceptance are shown: the best one, its target, and what is drawn."""

from __future__ import annotations

import json

import pytest

from paceline.commands.simulate_estimators import document, panels, texts
from paceline.workbench.estimators import AS_PROPOSED, ESTIMATORS, KEPT, Outcome, Scores, score


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
        _, scores, _ = texts({"suffix": scores_where(best)})
        (starred,) = [line for line in scores.splitlines() if "*" in line]
        assert starred.startswith(best)
        assert starred.split()[-3:] == ["0.6931", "0.2500", "0.000"]
        assert scores.startswith("suffix: 100 labelled nodes")


def test_a_known_bias_misses_the_target() -> None:
    biased, right = (texts({"suffix": scores_where(best)})[2] for best in (AS_PROPOSED, KEPT))
    assert "0.90           0.50     100" in biased
    assert "calibration error 0.400, at most 0.05 is aimed at: not met" in biased
    assert "calibration error 0.000, at most 0.05 is aimed at: met" in right
    assert "chance alone makes 0.040" in right


def test_a_proposer_without_drafts_is_said_to_be_one() -> None:
    compared = {"suffix": scores_where(KEPT), "ngram_model": {}}
    assert texts(compared)[-1] == "ngram_model drafted nothing"
    assert list(panels(compared)) == ["suffix"]
    assert list(panels(compared)["suffix"]) == [AS_PROPOSED, KEPT]
    found = json.loads(json.dumps(document(compared)))
    assert found["ngram_model"] == {"num_labels": 0}
    assert found["suffix"]["best"] == KEPT
    assert found["suffix"]["num_labels"] == 100
    assert list(found["suffix"]["scores"]) == list(ESTIMATORS)
    ((count, estimate, accepted),) = found["suffix"]["scores"][AS_PROPOSED]["bins"]
    assert (count, estimate, accepted) == (100, pytest.approx(0.9), 0.5)
