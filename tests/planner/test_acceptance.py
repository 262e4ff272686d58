"""The calibration: what is a label, that it finds the truth, and that it follows a change."""

from __future__ import annotations

import logging
import math
import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planner.acceptance import Calibration
from paceline.planner.drafts import merge
from paceline.request.request import VerifyResult
from paceline.request.span import ROOT, DraftTree

MISS = 999
"""A token that nobody drafts."""


def chain(probs: list[float], origin: str = "lookup") -> DraftTree:
    return DraftTree.chain(list(range(len(probs))), probs, origin)


def verified(tree: DraftTree, path: list[int], tokens: list[int]) -> VerifyResult:
    return VerifyResult(path, tokens, (), tree)


def observe(calibration: Calibration, request: int, result: VerifyResult) -> None:
    calibration.learn(request, result.draft, result.token_ids)


def draft(
    calibration: Calibration, rng: random.Random, rate: float, length: int, request: int = 0
) -> int:
    """One step with a chain whose tokens are right with probability ``rate``; tokens emitted."""
    tree = chain([0.5] * length)
    calibration.calibrate(request, tree)
    right = 0
    while right < length and rng.random() < rate:
        right += 1
    observe(calibration, request, verified(tree, list(range(right + 1)), [*range(right), MISS]))
    return right + 1


def decode(
    calibration: Calibration, rng: random.Random, rate: float, length: int, tokens: int
) -> float:
    """Draft until so many tokens were emitted; the estimate at the end."""
    while tokens > 0:
        tokens -= draft(calibration, rng, rate, length)
    return calibration.estimate(0, "lookup", 1, 0.5)


# Labels


def test_exactly_the_children_of_accepted_nodes_are_labels() -> None:
    #       root -> 0 (right) -> 2 (wrong) -> 4
    #            -> 1 (wrong) -> 3
    tree = DraftTree(
        [10, 11, 12, 13, 14], [ROOT, ROOT, 0, 1, 2], [0.5] * 5, ["a", "b", "c", "d", "e"]
    )
    calibration = Calibration()
    calibration.calibrate(0, tree)
    before = [calibration.estimate(0, origin, 1, 0.5) for origin in "abcde"]
    observe(calibration, 0, verified(tree, [0, 1], [10, MISS]))
    after = [calibration.estimate(0, origin, 1, 0.5) for origin in "abcde"]
    signs = [(b > a) - (b < a) for a, b in zip(before, after, strict=True)]
    assert signs == [1, -1, -1, 0, 0]


def test_what_a_stop_cut_off_is_no_label() -> None:
    calibration, tree = Calibration(), chain([0.5] * 3)
    tree.origins = ["a", "b", "c"]
    calibration.calibrate(0, tree)
    before = [calibration.estimate(0, origin, 1, 0.5) for origin in "bc"]
    observe(calibration, 0, verified(tree, [0], [0]))  # the request ended with the first token
    assert [calibration.estimate(0, origin, 1, 0.5) for origin in "bc"] == before
    assert calibration.estimate(0, "a", 1, 0.5) > before[0]


def test_merged_and_pruned_drafts_teach_their_origins() -> None:
    calibration = Calibration()
    trees = [chain([0.5, 0.5], "a"), DraftTree.chain([5, 6], [0.5, 0.5], "b")]
    for tree in trees:
        calibration.calibrate(0, tree)
    before = [calibration.estimate(0, origin, 1, 0.5) for origin in "ab"]
    tree = merge(trees)
    tree = tree.select([i for i in range(len(tree)) if tree.parents[i] == ROOT])
    observe(calibration, 0, verified(tree, [0, 1 + tree.token_ids.index(0)], [0, MISS]))
    after = [calibration.estimate(0, origin, 1, 0.5) for origin in "ab"]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_who_named_a_node_shares_its_error() -> None:
    calibration = Calibration()
    trees = [chain([0.5], "a"), chain([0.25], "b"), DraftTree.chain([5], [0.2], "c")]
    before = [calibration.estimate(0, origin, 1, 0.5) for origin in "abc"]
    tree = merge(trees)  # as if they had been calibrated
    together, other = tree.accept_probs
    observe(calibration, 0, verified(tree, [0, 1], [0, MISS]))
    after = [calibration.estimate(0, origin, 1, 0.5) for origin in "abc"]
    assert after[0] - before[0] > after[1] - before[1] > 0 > after[2] - before[2]
    # What the two had in common was a third b's.
    for origin, error in (("a", (1 - together) * 2 / 3), ("b", (1 - together) / 3), ("c", -other)):
        alone = Calibration()
        observe(
            alone, 0, verified(chain([1 - error if error > 0 else -error], origin), *said(error))
        )
        assert alone.estimate(0, origin, 1, 0.5) == pytest.approx(after["abc".index(origin)])


def said(error: float) -> tuple[list[int], list[int]]:
    """A path and the tokens of a step that accepts a chain of one token, or does not."""
    return ([0, 1], [0, MISS]) if error > 0 else ([0], [MISS])


def test_a_merged_estimate_becomes_what_is_accepted() -> None:
    """Both are right half of the time, on the same tokens: agreement makes nothing surer."""
    calibration, drawn = Calibration(), random.Random(3)
    estimate = 0.0
    for _ in range(400):
        trees = [chain([0.5], "a"), chain([0.5], "b")]
        for tree in trees:
            calibration.calibrate(0, tree)
        merged = merge(trees)
        estimate = merged.accept_probs[0]
        right = drawn.random() < 0.5
        observe(calibration, 0, verified(merged, *said(1.0 if right else -1.0)))
    assert estimate == pytest.approx(0.5, abs=0.12)


# Estimates


@given(st.data())
def test_estimates_are_probabilities(data: st.DataObject) -> None:
    calibration = Calibration()
    for _ in range(3):
        count = data.draw(st.integers(1, 12))
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(count)]
        probs = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
        origins = [data.draw(st.sampled_from(("lookup", "draft_model"))) for _ in range(count)]
        tree = DraftTree(list(range(count)), parents, probs, origins)
        calibration.calibrate(0, tree)
        assert all(0.0 < prob < 1.0 for prob in tree.accept_probs)
        first = parents.index(ROOT)
        observe(calibration, 0, verified(tree, [0, first + 1], [first, MISS]))
    assert calibration.num_invalid == 0


def test_one_node_is_estimated_as_in_a_tree() -> None:
    calibration, rng = Calibration(), random.Random(0)
    for request in (0, 1, 0, 1, 1):
        draft(calibration, rng, 0.6, 6, request)
    probs = [0.0, 0.03, 0.2, 0.5, 0.5, 0.77, 0.9, 0.98, 1.0, 0.4, 0.3]
    tree = chain(probs)
    calibration.calibrate(1, tree)
    single = [calibration.estimate(1, "lookup", i + 1, prob) for i, prob in enumerate(probs)]
    assert single == tree.accept_probs


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.8, 0.95])
def test_it_finds_the_truth(rate: float, length: int) -> None:
    calibration, rng = Calibration(), random.Random(1)
    late = []
    for step in range(600):
        draft(calibration, rng, rate, length)
        if step >= 100:
            late.append(calibration.estimate(0, "lookup", 1, 0.5))
    assert mean(late) == pytest.approx(rate, abs=0.05)


def test_a_request_moves_itself_and_hardly_its_neighbour() -> None:
    calibration, rng = Calibration(), random.Random(3)
    own, neighbour = (calibration.estimate(request, "lookup", 1, 0.5) for request in (0, 1))
    for _ in range(12):
        draft(calibration, rng, 0.0, 4, request=0)
    moved = own - calibration.estimate(0, "lookup", 1, 0.5)
    assert moved > 0.25
    assert abs(neighbour - calibration.estimate(1, "lookup", 1, 0.5)) < 0.2 * moved


def test_nothing_is_kept_of_a_finished_request() -> None:
    calibration, rng = Calibration(), random.Random(4)
    fresh = calibration.estimate(1, "lookup", 1, 0.5)
    for _ in range(30):
        draft(calibration, rng, 1.0, 4, request=0)
    high = calibration.estimate(0, "lookup", 1, 0.5)
    calibration.finish(0)
    calibration.finish(0)
    assert high - calibration.estimate(0, "lookup", 1, 0.5) > 0.5 * (high - fresh)


# Changes


@pytest.mark.parametrize("length", [1, 4, 8])
@pytest.mark.parametrize(("before", "after"), [(0.1, 0.9), (0.9, 0.1), (0.2, 0.8), (0.8, 0.2)])
def test_a_change_of_text_is_followed_within_32_tokens(
    before: float, after: float, length: int
) -> None:
    starts, ends = [], []
    for seed in range(15):
        calibration, rng = Calibration(), random.Random(seed)
        starts.append(decode(calibration, rng, before, length, tokens=96))
        ends.append(decode(calibration, rng, after, length, tokens=32))
    assert mean(starts) == pytest.approx(before, abs=0.1)
    assert abs(mean(ends) - after) < 0.2 * abs(before - after)


def test_however_long_a_text_was_certain_its_change_is_followed() -> None:
    calibration, rng = Calibration(), random.Random(5)
    assert decode(calibration, rng, 1.0, 8, tokens=20_000) > 0.97
    assert decode(calibration, rng, 0.05, 8, tokens=32) < 0.35


@pytest.mark.parametrize("prob", [0.02, 0.5])
def test_many_labels_at_once_do_not_overshoot(prob: float) -> None:
    calibration, rng = Calibration(), random.Random(6)
    tree = chain([prob] * 64)
    calibration.calibrate(0, tree)
    observe(calibration, 0, verified(tree, list(range(65)), [*range(64), MISS]))
    # 65 successes and a Beta(1, 1) prior would say 0.985.
    assert 0.3 < calibration.estimate(0, "lookup", 1, prob) < 0.985
    assert decode(calibration, rng, 0.1, 4, tokens=32) < 0.3


# Bad input


def test_what_is_no_probability_is_clamped_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calibration = Calibration()
    with caplog.at_level(logging.WARNING):
        tree = chain([0.5, math.nan, 1.5, -0.1, math.inf, -math.inf, 0.5])
        calibration.calibrate(0, tree)
        again = [calibration.estimate(0, "lookup", 1, prob) for prob in (math.nan, 7.0)]
    assert (calibration.num_invalid, len(caplog.records)) == (7, 1)
    calibration.calibrate(0, (alone := chain([0.5, math.nan, 0.5])))
    assert alone.accept_probs[1] == tree.accept_probs[1]
    good = chain([0.5, 0.0, 1.0, 0.0, 1.0, 0.0, 0.5])
    calibration.calibrate(0, good)
    assert tree.accept_probs == good.accept_probs
    assert again == [calibration.estimate(0, "lookup", 1, prob) for prob in (0.0, 1.0)]


@pytest.mark.parametrize(("path", "tokens"), [([0], [MISS]), ([0, 1, 2], [0, 1, MISS])])
@pytest.mark.parametrize("prob", [0.0, 0.5, 1.0])
def test_a_label_that_repeats_for_ever_does_no_harm(
    prob: float, path: list[int], tokens: list[int]
) -> None:
    calibration = Calibration()
    tree = chain([prob, prob])
    calibration.calibrate(0, tree)
    for _ in range(50_000):
        observe(calibration, 0, verified(tree, path, tokens))
    for other in (0.0, 0.5, 1.0):
        assert 0.0 <= calibration.estimate(0, "lookup", 1, other) <= 1.0
    low, high = (calibration.estimate(0, "lookup", 9, other) for other in (0.1, 0.9))
    assert low <= high


def test_no_nodes_teach_nothing() -> None:
    tree, calibration = DraftTree(), Calibration()
    before = calibration.estimate(0, "lookup", 1, 0.5)
    calibration.calibrate(0, tree)
    observe(calibration, 0, verified(tree, [0], [MISS]))
    assert tree == DraftTree()
    assert calibration.estimate(0, "lookup", 1, 0.5) == before


# Adapters


def test_requests_of_an_adapter_share_what_those_of_the_model_do_not() -> None:
    calibration, rng = Calibration(), random.Random(5)

    def decoded(requests: range, rate: float, adapter: str | None) -> float:
        """What is expected of the next request after so many."""
        for request in requests:
            if adapter is not None:
                calibration.adapt(request, adapter)
            for _ in range(20):
                draft(calibration, rng, rate, 4, request)
            calibration.finish(request)
        return calibration.estimate(-1, "lookup", 1, 0.5)

    def of(adapter: str) -> float:
        calibration.adapt(-2, adapter)
        return calibration.estimate(-2, "lookup", 1, 0.5)

    model = decoded(range(30), 0.8, None)
    assert of("one") == model  # which is what an adapter begins with
    assert decoded(range(30, 60), 0.2, "one") == model
    one = of("one")
    assert one < model - 0.2
    assert decoded(range(60, 90), 0.8, None) == pytest.approx(model, abs=0.1)
    assert (of("one"), of("other") > model - 0.1) == (one, True)
