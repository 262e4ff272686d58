"""Estimators in worlds whose truth is known, the scores by hand, and the log of a real engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import log
from statistics import mean
from typing import Any

import pytest

from paceline.config import SpeculativeConfig
from paceline.planner.priors import LEAST_DEPTHS
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request.request import Request, VerifyResult
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import ROOT, DraftTree
from tests.programs import module
from tests.toy import VOCAB, Job, run_jobs, toy_engine

MISS = 999
RESEARCH, SCORES = module("research.estimators"), module("research.scores")
ESTIMATORS, AS_PROPOSED, KEPT = RESEARCH.ALL, RESEARCH.AS_PROPOSED, RESEARCH.KEPT
LoggedDraft, Outcome = SCORES.LoggedDraft, SCORES.Outcome
replay, score = SCORES.replay, SCORES.score


def steps(
    rng: random.Random, count: int, truth: dict[float, float], request_id: int = 0, length: int = 4
) -> Any:
    """Chains whose proposer says one of ``truth``'s keys, and is right as often as it says."""
    log = []
    for _ in range(count):
        probs = [rng.choice(list(truth)) for _ in range(length)]
        right = 0
        while right < length and rng.random() < truth[probs[right]]:
            right += 1
        tree = DraftTree.chain(list(range(length)), probs, "lookup")
        log.append([LoggedDraft(request_id, [tree], [*range(right), MISS])])
    return log


# Labels


def test_every_estimate_is_made_before_its_step_is_learnt() -> None:
    calls: list[tuple[str, int]] = []

    class Spy(RESEARCH.NodeEstimator):
        def calibrate(self, request_id: int, tree: DraftTree) -> None:
            calls.append(("calibrate", request_id))
            super().calibrate(request_id, tree)

        def observe(self, request_id: int, result: VerifyResult) -> None:
            calls.append(("observe", request_id))

        def finish(self, request_id: int) -> None:
            calls.append(("finish", request_id))

    tree = DraftTree.chain([1], [0.5], "lookup")
    one, two = (LoggedDraft(request, [tree], [1]) for request in (1, 2))
    outcomes = replay([[one, two], [], [two]], Spy())
    assert calls == [
        *(("calibrate", 1), ("calibrate", 2)),
        *(("observe", 1), ("finish", 1), ("observe", 2)),
        *(("calibrate", 2), ("observe", 2), ("finish", 2)),
    ]
    assert outcomes == [Outcome(1, 0.5, True), Outcome(2, 0.5, True), Outcome(2, 0.5, True)]
    assert tree.origins == ["lookup"]  # the log itself stays as it was


# Estimators


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != AS_PROPOSED])
@pytest.mark.parametrize("truth", [{0.5: 0.85}, {0.5: 0.2}, {0.3: 0.1, 0.7: 0.5}])
def test_every_estimator_learns_how_wrong_a_proposer_is(
    name: str, truth: dict[float, float]
) -> None:
    log = steps(random.Random(0), 600, truth)
    believed = replay(log, ESTIMATORS[AS_PROPOSED]())
    ideal = score([replace(o, estimate=truth[o.estimate]) for o in believed]).log_loss
    excess = score(replay(log, ESTIMATORS[name]())).log_loss - ideal
    assert excess < 0.35 * (score(believed).log_loss - ideal)


@pytest.mark.parametrize("name", [KEPT, "Kalman on logit", "Beta counts, by request"])
def test_some_tell_requests_apart(name: str) -> None:
    rng = random.Random(1)
    log = [
        [*easy, *hard]
        for easy, hard in zip(
            steps(rng, 300, {0.5: 0.9}, request_id=0),
            steps(rng, 300, {0.5: 0.1}, request_id=1),
            strict=True,
        )
    ]
    late = replay(log, ESTIMATORS[name]())[600:]
    assert mean(o.estimate for o in late if o.request_id == 0) > 0.75
    assert mean(o.estimate for o in late if o.request_id == 1) < 0.25


# Who wins


def scores_of(log: Any) -> dict[str, Any]:
    return {name: score(outcomes) for name, outcomes in SCORES.compare(log, ESTIMATORS).items()}


def best_of(scores: dict[str, Any]) -> str:
    """The name with the lowest log-loss."""
    return min(scores, key=lambda name: scores[name].log_loss)


def test_who_is_right_from_the_start_is_best_believed() -> None:
    scores = scores_of(steps(random.Random(0), 500, {0.3: 0.3, 0.5: 0.5, 0.8: 0.8}))
    assert list(scores) == list(ESTIMATORS)
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


# Scores


def test_scores_by_hand() -> None:
    outcomes = [Outcome(0, 0.8, True), Outcome(0, 0.8, False), Outcome(0, 0.35, False)]
    scores = score([*outcomes, Outcome(0, 1.0, False)])
    assert scores.count == 4
    assert scores.log_loss == pytest.approx(-(log(0.8) + log(0.2) + log(0.65) + log(0.001)) / 4)
    assert scores.brier == pytest.approx((0.04 + 0.64 + 0.1225 + 1.0) / 4)
    assert [(b.count, b.estimate, b.accepted) for b in scores.bins] == [
        (1, pytest.approx(0.35), 0.0),
        (2, pytest.approx(0.8), 0.5),
        (1, 1.0, 0.0),
    ]
    assert scores.calibration_error == pytest.approx((0.35 + 2 * 0.3 + 1.0) / 4)


def test_a_known_bias_is_the_calibration_error() -> None:
    outcomes = [Outcome(0, 0.9, place % 2 == 0) for place in range(400)]
    scores = score(outcomes)
    assert scores.calibration_error == pytest.approx(0.4)
    log = steps(random.Random(3), 600, {0.5: 0.9})
    learnt = scores_of(log)
    assert learnt[AS_PROPOSED].calibration_error == pytest.approx(0.4, abs=0.02)
    assert learnt[KEPT].calibration_error < 0.05


def test_priors_are_the_line_that_labels_lie_on() -> None:
    slope, intercept = 0.7, 0.4
    truth = {
        prob: RESEARCH.sigmoid(slope * RESEARCH.logit(prob) + intercept)
        for prob in (0.1, 0.3, 0.5, 0.7, 0.9)
    }
    priors = module("research.calibration").fit_priors(
        [steps(random.Random(3), 4000, truth, length=2)]
    )
    assert list(priors) == ["lookup"]
    lines = priors["lookup"]
    assert len(lines) == len(LEAST_DEPTHS)
    for line in lines[:2]:
        assert line == (pytest.approx(slope, abs=0.1), pytest.approx(intercept, abs=0.1))
    assert set(lines[2:]) == {lines[1]}  # no label is that deep


# The log of an engine


class Oracle(Proposer):
    """Knows the answer: drafts its next token beside a wrong one, and below it a wrong one."""

    name = "oracle"
    config = SpeculativeConfig(num_speculative_tokens=2, max_tree_nodes=3, max_branching=2)

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        trees = []
        for request in requests:
            right = self.answer[len(request.token_ids)]
            tokens = [right, (right + 1) % VOCAB, VOCAB - 1]
            trees.append(DraftTree(tokens, [ROOT, ROOT, 0], [0.6, 0.3, 0.1], [self.name] * 3))
        return trees


def test_an_engine_logs_what_was_drafted_and_what_it_made_of_it() -> None:
    prompt, params = [5, 6, 7], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    ((plain,),) = run_jobs(toy_engine(), [Job(prompt, params)])
    assert VOCAB - 1 not in plain.token_ids
    engine, recorder = toy_engine([Oracle(prompt + plain.token_ids)]), SCORES.Recorder()
    engine.drafting.planner = recorder
    ((result,),) = run_jobs(engine, [Job(prompt, params)])
    drafts = [draft for step in recorder.log for draft in step]
    assert result.token_ids[1:11] == [token for draft in drafts for token in draft.token_ids]
    assert [draft.token_ids[0] for draft in drafts] == [
        draft.trees[0].token_ids[0] for draft in drafts
    ]
    outcomes = replay(recorder.log, RESEARCH.NodeEstimator())
    assert [(o.estimate, o.accepted) for o in outcomes] == 5 * [
        (0.6, True),
        (0.3, False),
        (0.1, False),
    ]
