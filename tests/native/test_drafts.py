"""The native halves of drafts' estimates against those in Python, which they must equal."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ProposerError
from paceline.policy.acceptance import Calibration
from paceline.policy.merging import merge
from paceline.span import ROOT, DraftTree
from tests.test_span import VOCAB, draft_trees

native = pytest.importorskip("paceline._native", reason="the native kernels are not built")

ORIGINS = ("suffix", "draft_model", "unknown")


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, list[DraftTree], list[int]]]:
    """What was drafted for a request, by one to three proposers, and what the target emitted."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        trees = []
        for origin in draw(st.lists(st.sampled_from(ORIGINS), min_size=1, max_size=3, unique=True)):
            tree = draw(draft_trees(max_nodes=14))
            tree.origins = [origin] * len(tree)
            trees.append(tree)
        emitted = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4))
        found.append((draw(st.integers(0, 2)), trees, emitted))
    return found


def one_step(
    calibration: Any, merging: Any, request: int, trees: list[DraftTree], emitted: list[int]
) -> list[DraftTree]:
    """The trees of a step and what became of them; the calibration has learnt from it."""
    trees = [copy.deepcopy(tree) for tree in trees]
    for tree in trees:
        calibration.calibrate(request, tree)
    merged = merging(trees)
    calibration.learn(request, merged, emitted)
    return [*trees, merged]


@given(steps(), st.sets(st.integers(0, 11)))
def test_both_estimate_and_learn_alike(
    steps: list[tuple[int, list[DraftTree], list[int]]], ends: set[int]
) -> None:
    ours, theirs = native.Calibration(), Calibration()
    for at, step in enumerate(steps):
        assert one_step(ours, native.merge, *step) == one_step(theirs, merge, *step)
        if at in ends:
            ours.finish(step[0])
            theirs.finish(step[0])
    assert ours.num_requests == theirs.num_requests
    for request in range(4):
        for origin in ORIGINS:
            for depth, prob in ((1, 0.0), (2, 0.3), (7, 0.9), (40, 1.0)):
                ask = (request, origin, depth, prob)
                assert ours.estimate(*ask) == theirs.estimate(*ask)


@given(st.lists(draft_trees(), max_size=4))
def test_both_merge_uncalibrated_trees_alike(trees: list[DraftTree]) -> None:
    assert native.merge(trees) == merge(trees)


def test_a_single_tree_is_itself() -> None:
    tree = DraftTree.chain([5], [0.5], "x")
    assert native.merge((DraftTree(), tree)) is tree


def test_nothing_is_learnt_without_evidence() -> None:
    calibration = native.Calibration()
    before = calibration.estimate(0, "suffix", 1, 0.5)
    for _ in range(9):
        calibration.learn(0, DraftTree.chain([5], [0.5], "suffix"), [5])
    calibration.calibrate(0, DraftTree())
    assert calibration.estimate(0, "suffix", 1, 0.5) == before


def test_what_is_no_probability_is_clamped_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calibration = native.Calibration()
    tree = DraftTree.chain([1, 2, 3, 4], [0.5, math.nan, 1.5, -math.inf], "suffix")
    good = DraftTree.chain([1, 2, 3, 4], [0.5, 0.0, 1.0, 0.0], "suffix")
    with caplog.at_level(logging.WARNING):
        calibration.calibrate(0, tree)
        assert calibration.estimate(0, "suffix", 1, 7.0) == calibration.estimate(0, "suffix", 1, 1)
    calibration.calibrate(0, good)
    assert tree.accept_probs == good.accept_probs
    assert (calibration.num_invalid, len(caplog.records)) == (4, 1)


# --- is_sound -------------------------------------------------------------------------------------


@given(draft_trees())
def test_valid_trees_are_sound(tree: DraftTree) -> None:
    assert native.is_sound(tree, VOCAB)


@given(draft_trees(), st.data())
def test_what_is_sound_passes_a_closer_look(tree: DraftTree, data: st.DataObject) -> None:
    if not tree.token_ids:
        return
    node = data.draw(st.integers(0, len(tree) - 1))
    fault = data.draw(st.sampled_from(("token_ids", "parents", "accept_probs", "origins")))
    values = {
        "token_ids": st.sampled_from([-1, 0, VOCAB - 1, VOCAB, 1 << 70, True, 1.0, None]),
        "parents": st.sampled_from([ROOT, -2, 0, node - 1, node, 1 << 70, False, None]),
        "accept_probs": st.sampled_from([0.0, 1.0, math.nan, -0.5, 1.5, math.inf]),
        "origins": st.just("b"),
    }
    value = getattr(tree, fault)[node] = data.draw(values[fault])
    if data.draw(st.booleans()):
        getattr(tree, fault).append(0)
    if native.is_sound(tree, VOCAB):
        tree.validate(VOCAB)
        assert tree.clamp_probs() == 0
    elif fault in ("token_ids", "parents") and type(value) is not bool:
        with pytest.raises(ProposerError):
            tree.validate(VOCAB)


# --- faulty arguments -----------------------------------------------------------------------------


def calibrated(**changes: Any) -> DraftTree:
    tree = DraftTree.chain([5, 6], [0.5, 0.5], "suffix")
    native_calibration.calibrate(0, tree)
    return replace(tree, **changes)


native_calibration = native.Calibration()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"evidence": [1 << 20, 0]}, ValueError, "not of this calibration"),
        ({"evidence": [-1, 0]}, ValueError, "not of this calibration"),
        ({"evidence": [0]}, ValueError, "differ in length"),
        ({"token_ids": [5]}, ValueError, "differ in length"),
        ({"accept_probs": [0.5]}, ValueError, "differ in length"),
        ({"parents": [ROOT, 1]}, ValueError, "parent of draft node 1 is 1"),
        ({"parents": [ROOT, -2]}, ValueError, "parent of draft node 1 is -2"),
        ({"claims": [[]]}, ValueError, "differ in length"),
        ({"claims": [[(0, 0.5, 0.0)], []]}, ValueError, "not of two numbers"),
        ({"claims": [[(1 << 20, 0.5)], []]}, ValueError, "not of this calibration"),
        ({"claims": [5, 6]}, TypeError, "no sequence"),
        ({"token_ids": ["a", 6]}, TypeError, "integer"),
    ],
)
def test_faulty_trees_teach_nothing(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    native_calibration.learn(0, calibrated(), [5])
    with pytest.raises(error, match=message):
        native_calibration.learn(0, calibrated(**changes), [5])


def test_other_faulty_arguments_are_refused() -> None:
    tree = DraftTree.chain([5, 6], [0.5, 0.5], "suffix")
    with pytest.raises(ValueError, match="emitted nothing"):
        native_calibration.learn(0, calibrated(), [])
    with pytest.raises(ValueError, match="below 0"):
        native_calibration.estimate(0, "suffix", -1, 0.5)
    for faulty in (replace(tree, origins=["a"]), replace(tree, accept_probs=[0.5])):
        with pytest.raises(ValueError, match="differ in length"):
            native_calibration.calibrate(0, faulty)
        with pytest.raises(ValueError, match="differ in length"):
            native.merge([faulty, tree])
    with pytest.raises(TypeError, match="unhashable"):
        native_calibration.calibrate(0, replace(tree, origins=[[], []]))
    with pytest.raises(TypeError, match="no sequence"):
        native.merge(5)
    with pytest.raises(AttributeError, match="token_ids"):
        native.merge([None])
