"""What the acceptance benchmark makes of counts: targets, ratios, calibration errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs import module


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


def test_the_calibration_error_by_hand() -> None:
    reliability = module("research.node_budget").Reliability()
    assert reliability.ratios() == {"labels": 0}
    for estimate, accepted in ((0.25, True), (0.25, False), (1.0, True), (1.0, True)):
        reliability.add(estimate, accepted)
    other = module("research.node_budget").Reliability()
    other.add(0.75, False)
    reliability.join(other)
    # Two labels a quarter off each, two right, one off by three quarters.
    found = reliability.ratios()
    assert found["calibration_error"] == pytest.approx((2 * 0.25 + 0.75) / 5)
    assert found["bins"] == [[2, 0.25, 0.5], [1, 0.75, 0.0], [2, 1.0, 1.0]]
