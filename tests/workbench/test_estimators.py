"""Estimators in worlds whose truth is known, the scores by hand, and the log of a real engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import mean

import pytest

from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError
from paceline.policy.evidence import LEAST_DEPTHS
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request import Request, VerifyResult
from paceline.sampling_params import SamplingParams
from paceline.span import ROOT, DraftTree
from paceline.workbench.estimators import (
    AS_PROPOSED,
    KEPT,
    AsProposed,
    LoggedDraft,
    Outcome,
    Recorder,
    replay,
    score,
)
from paceline.workbench.plots import plot_reliability
from tests.programs import module
from tests.toy import VOCAB, Job, run_jobs, toy_engine

MISS = 999
RESEARCH = module("research.estimators")
ESTIMATORS = RESEARCH.ALL


def steps(
    rng: random.Random, count: int, truth: dict[float, float], request_id: int = 0, length: int = 4
) -> list[list[LoggedDraft]]:
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

    class Spy(AsProposed):
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
    assert tree.evidence == []  # the log itself stays as it was


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


def test_a_reliability_diagram_is_drawn(tmp_path: Path) -> None:
    scores = score([Outcome(0, 0.3, True), Outcome(0, 0.9, True)])
    plot_reliability({"one": {"a": scores, "b": scores}, "two": {"a": scores}}, tmp_path / "r.svg")
    assert "<svg" in (tmp_path / "r.svg").read_text()
    with pytest.raises(ConfigError, match="png"):
        plot_reliability({"one": {"a": scores}}, tmp_path / "r.txt")


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
    engine, recorder = toy_engine([Oracle(prompt + plain.token_ids)]), Recorder()
    engine.drafting.planner = recorder
    ((result,),) = run_jobs(engine, [Job(prompt, params)])
    drafts = [draft for step in recorder.log for draft in step]
    assert result.token_ids[1:11] == [token for draft in drafts for token in draft.token_ids]
    assert [draft.token_ids[0] for draft in drafts] == [
        draft.trees[0].token_ids[0] for draft in drafts
    ]
    outcomes = replay(recorder.log, AsProposed())
    assert [(o.estimate, o.accepted) for o in outcomes] == 5 * [
        (0.6, True),
        (0.3, False),
        (0.1, False),
    ]
