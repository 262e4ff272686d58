"""What the acceptance benchmark makes of counts: targets, ratios, calibration errors."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

import pytest

from paceline.config import SpeculativeConfig
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import ROOT, DraftTree
from tests.programs import module
from tests.toy import VOCAB, Job, run_jobs, toy_engine


def rows(name: str, temperature: float, **lengths: float) -> list[dict[str, Any]]:
    report = module("research.acceptance")
    found = dict.fromkeys(report.SINGLE, 1.0) | {report.MERGED: lengths["merged"]}
    found |= {key: value for key, value in lengths.items() if key in report.SINGLE}
    label = {"set": name, "temperature": temperature, "nodes": report.NODES}
    return [{**label, "proposer": arm, report.LENGTH: value} for arm, value in found.items()]


def test_the_merged_tree_is_held_against_the_best_of_each_set() -> None:
    report = module("research.acceptance")
    results = [
        *rows("code", 0.0, merged=6.0, ngram_model=5.0, draft_model=3.0),
        *rows("code", 0.8, merged=2.97, ngram_model=1.5, draft_model=3.0),
    ]
    mean, least, suffix = report.targets(results)[:3]
    assert mean.value == pytest.approx((1.2 + 0.99) / 2)
    assert least.value == pytest.approx(0.99)
    assert (mean.met, least.met, suffix.met) == (False, True, True)


def test_a_failed_arm_leaves_its_targets_without_a_value() -> None:
    report = module("research.acceptance")
    results = rows("code", 0.0, merged=6.0)
    results[0] = {
        "set": "code",
        "temperature": 0.0,
        "nodes": 16,
        "proposer": "prompt_lookup",
        "error": "broken",
    }
    assert [target.value for target in report.targets(results)[:3]] == [None] * 3


def test_an_answer_that_differs_is_seen() -> None:
    report = module("research.acceptance")
    engine = {"arm": "draft_model", "set": "code", "temperature": 0.0, "prompts": 4}
    for identical, met in ((4, True), (3, False)):
        target = report.targets([{**engine, "identical": identical}])[-1]
        assert (target.value, target.met) == (identical / 4, met)
    failed = report.targets([{**engine, "identical": 4, "error": "broken"}])[-1]
    assert failed.value is None


# How reliable estimates are


def test_the_scores_by_hand() -> None:
    scored = module("research.node_budget")
    reliability = scored.Reliability()
    assert reliability.ratios() == {"labels": 0}
    reliability.add([(0.8, True), (0.8, False), (0.35, False)])
    reliability.add([(1.0, False)])
    found = reliability.ratios()
    assert found["labels"] == 4
    assert found["log_loss"] == pytest.approx(-(log(0.8) + log(0.2) + log(0.65) + log(0.001)) / 4)
    assert found["bins"] == [
        [1, pytest.approx(0.35), 0.0],
        [2, pytest.approx(0.8), 0.5],
        [1, 1.0, 0.0],
    ]
    assert found["calibration_error"] == pytest.approx((0.35 + 2 * 0.3 + 1.0) / 4)


def test_a_known_bias_is_the_calibration_error() -> None:
    labels = [(0.9, place % 2 == 0) for place in range(400)]
    assert module("research.node_budget").scores(labels)["calibration_error"] == pytest.approx(0.4)


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


@pytest.mark.parametrize("nodes", [1, 3])
def test_all_that_was_drafted_is_judged_however_little_is_verified(nodes: int) -> None:
    prompt, params = [5, 6, 7], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    ((plain,),) = run_jobs(toy_engine(), [Job(prompt, params)])
    assert VOCAB - 1 not in plain.token_ids
    engine = toy_engine([Oracle(prompt + plain.token_ids)])
    engine.drafting.planner = planner = module("research.node_budget").NodeBudget(nodes)
    ((result,),) = run_jobs(engine, [Job(prompt, params)])
    assert result.token_ids == plain.token_ids
    labels = planner.own["oracle"].labels
    assert [accepted for _, accepted in labels] == [*(5 * [True, False, False]), True, False]
    assert [estimate for estimate, _ in labels[:3]] == pytest.approx([0.6, 0.3, 0.1], abs=2e-3)
    assert planner.chosen_by.labels == labels  # nobody else drafts
