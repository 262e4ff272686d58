"""Estimators compared: who has to win, errors that are known, and the log of a replay."""

from __future__ import annotations

import random

import pytest

from paceline.engine.planners import PLANNERS
from paceline.workbench.estimators import (
    AS_PROPOSED,
    ESTIMATORS,
    KEPT,
    TOGETHER,
    Log,
    Outcome,
    Scores,
    arms_of,
    best_of,
    compare,
    compared,
    log_of,
    score,
)
from paceline.workbench.simulate import Configs
from tests.programs import module
from tests.toy import draft_config
from tests.workbench.test_estimators import steps
from tests.workbench.test_simulate import DRAFT, LOOKUP, simulator

ALL = module("research.estimators").ALL


def scores_of(log: Log) -> dict[str, Scores]:
    return {name: score(outcomes) for name, outcomes in compare(log, ALL).items()}


# Who wins


def test_who_is_right_from_the_start_is_best_believed() -> None:
    scores = scores_of(steps(random.Random(0), 500, {0.3: 0.3, 0.5: 0.5, 0.8: 0.8}))
    assert list(scores) == list(ALL)
    assert best_of(scores) == AS_PROPOSED
    assert scores[AS_PROPOSED].calibration_error < 0.04


def test_where_no_line_fits_the_estimates_counts_win() -> None:
    scores = scores_of(steps(random.Random(1), 500, {0.5: 0.2, 0.7: 0.9}))
    assert best_of(scores) == "Beta counts"


def test_where_requests_differ_who_tells_them_apart_wins() -> None:
    rng = random.Random(2)
    worlds = [steps(rng, 300, {0.5: truth}, request_id=at) for at, truth in enumerate((0.9, 0.1))]
    scores = scores_of([[*one, *two] for one, two in zip(*worlds, strict=True)])
    apart = {"Beta counts, by request", "Kalman on logit", KEPT}
    losses = {name: each.log_loss for name, each in scores.items()}
    assert max(losses[name] for name in apart) < min(losses[n] for n in losses if n not in apart)


# Errors


def test_a_known_bias_is_the_calibration_error() -> None:
    outcomes = [Outcome(0, 0.9, place % 2 == 0) for place in range(400)]
    scores = score(outcomes)
    assert scores.calibration_error == pytest.approx(0.4)
    log = steps(random.Random(3), 600, {0.5: 0.9})
    learnt = scores_of(log)
    assert learnt[AS_PROPOSED].calibration_error == pytest.approx(0.4, abs=0.02)
    assert learnt[KEPT].calibration_error < 0.05


# Along traces


def test_each_proposer_is_judged_alone_and_all_together() -> None:
    assert arms_of([LOOKUP]) == {"prompt_lookup": (LOOKUP,)}
    arms = arms_of([LOOKUP, DRAFT])
    assert arms == {
        "prompt_lookup": (LOOKUP,),
        "draft_model": (DRAFT,),
        TOGETHER: [LOOKUP, DRAFT],
    }
    assert {"draft_model (1)", "draft_model (2)"} < {*arms_of([DRAFT, draft_config()])}


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("configs", [[LOOKUP], [DRAFT], [LOOKUP, DRAFT]])
def test_as_many_labels_say_yes_as_a_replay_accepts(configs: Configs, concurrency: int) -> None:
    here = simulator(concurrency)
    (*_, (name, scores)) = compared(here, configs).items()
    assert list(scores) == list(ESTIMATORS)
    accepted = {round(sum(b.count * b.accepted for b in each.bins)) for each in scores.values()}
    replayed = here.run(configs, PLANNERS["fixed"]).total("num_accepted_tokens")
    assert replayed > 0
    assert accepted == {replayed}, name
    assert len({each.count for each in scores.values()}) == 1


def test_a_proposer_that_drafts_nothing_has_no_scores() -> None:
    here = simulator()
    here.traces = [here.traces[1]]  # nothing comes twice in it
    told: list[int] = []
    assert compared(here, [LOOKUP], told.append) == {"prompt_lookup": {}}
    assert told == [1]
    assert not any(log_of(here, [LOOKUP]))
