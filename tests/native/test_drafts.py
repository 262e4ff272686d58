"""The native halves of drafts' estimates against those in Python, which they must equal."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculativeConfig
from paceline.core.errors import ProposerError
from paceline.planner.choice import DraftLimits
from paceline.planner.drafts import Drafts
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.proposers.suffix import SuffixProposer
from paceline.request.request import NO_DRAFT
from paceline.request.span import ROOT, DraftTree
from tests.proposers.drive import make_request
from tests.request.test_span import VOCAB, draft_trees

native = pytest.importorskip("paceline._native", reason="the native kernels are not built")

ORIGINS = ("suffix", "draft_model", "unknown")
ADAPTERS = (None, "one", "other")
"""Of each request."""


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


def in_turn(
    drafts: Any, steps: list[tuple[int, list[DraftTree], list[int]]], ends: set[int]
) -> Any:
    """What becomes of the drafts of each step, one request per step and one that has none."""
    found = []
    for at, (request, trees, emitted) in enumerate(steps):
        drafts.begin([request, 99], [ADAPTERS[request], None])
        for tree in copy.deepcopy(trees):
            drafts.add(0, tree.origins[0] if tree.origins else "none", tree)
        whole = drafts.tree(0)
        count = drafts.choose(
            [DraftLimits(6, 4), DraftLimits(6, 4)], [1.0 + 0.05 * n for n in range(9)], 1.0,
            slowdown=0.5, ahead=[0.1, 2.0], node_budget=5,
        )  # fmt: skip
        gains = [drafts.gain(origin, [0, 1], 0.05) for origin in ORIGINS]
        parts = [drafts.tree(0), *drafts.chosen()]
        assert len(drafts.tree(1)) == len(parts[2]) == 0
        assert count == len(parts[1])
        found.append(
            (
                [_plain(each) for each in (whole, *parts)],
                [drafts.expected(0), drafts.expected(1), drafts.num_merges],
                [drafts.sizes(), gains, [drafts.depth(origin) for origin in ORIGINS]],
            )
        )
        drafts.learn(request, emitted)
        if at in ends:
            drafts.finish(request)
    return found


def _plain(tree: DraftTree) -> tuple[Any, ...]:
    return tree.token_ids, tree.parents, tree.accept_probs, tree.origins


@given(steps(), st.sets(st.integers(0, 11)), st.booleans())
def test_both_estimate_merge_choose_and_learn_alike(
    steps: list[tuple[int, list[DraftTree], list[int]]], ends: set[int], calibrates: bool
) -> None:
    ours, theirs = native.Drafts(calibrates), Drafts(calibrates)
    assert in_turn(ours, steps, ends) == in_turn(theirs, steps, ends)
    assert ours.num_requests == theirs.num_requests
    for request in range(4):
        for origin in ORIGINS:
            for depth, prob in ((1, 0.0), (2, 0.3), (7, 0.9), (40, 1.0)):
                ask = (request, origin, depth, prob)
                assert ours.estimate(*ask) == theirs.estimate(*ask)


def test_each_request_of_a_step_has_an_adapter_or_none() -> None:
    with pytest.raises(ValueError, match="differ in number"):
        native.Drafts().begin([1, 2], ["one"])


def test_a_new_step_has_nothing_of_the_one_before() -> None:
    drafts = native.Drafts()
    drafts.begin([1, 2])
    drafts.add(0, "suffix", DraftTree.chain([5], [0.5], "suffix"))
    assert drafts.sizes() == [1, 0]
    drafts.begin([1])
    assert drafts.sizes() == [0]
    assert drafts.choose([DraftLimits(4, 4)], [1.0, 1.0], 0.1, node_budget=4) == 0
    assert drafts.chosen() == [NO_DRAFT]
    drafts.learn(1, [5])
    drafts.learn(2, [5])


def test_what_is_no_probability_is_clamped_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafts = native.Drafts()
    drafts.begin([0, 1])
    with caplog.at_level(logging.WARNING):
        odd = [0.5, math.nan, 1.5, -math.inf]
        drafts.add(0, "suffix", DraftTree.chain([1, 2, 3, 4], odd, "suffix"))
        assert drafts.estimate(0, "suffix", 1, 7.0) == drafts.estimate(0, "suffix", 1, 1)
    drafts.add(1, "suffix", DraftTree.chain([1, 2, 3, 4], [0.5, 0.0, 1.0, 0.0], "suffix"))
    assert drafts.tree(0) == drafts.tree(1)
    assert (drafts.num_invalid, len(caplog.records)) == (4, 1)


# --- texts ----------------------------------------------------------------------------------------


def texts(is_native: bool, count: int) -> list[Any]:
    """Members of one source: a suffix automaton's drafts and a look-up's, for so many texts."""
    suffix = SuffixProposer(SpeculativeConfig("suffix"), is_native)
    lookup = PromptLookupProposer(SpeculativeConfig("prompt_lookup"), is_native)
    requests = [make_request(i, [1]) for i in range(count)]
    last = [*lookup.drafters(requests)[:-1], None]
    return [("suffix", 6, 4, suffix.drafters(requests)), ("prompt_lookup", 4, 3, last)]


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=5),
    st.sampled_from([0.5, 1.5, 99.0]),
)
def test_both_draft_from_texts_alike(pieces: list[list[int]], enough: float) -> None:
    found = []
    for is_native, drafts in ((True, native.Drafts()), (False, Drafts())):
        members, grown, seen = texts(is_native, 2), list[int](), []
        for piece in pieces:
            grown = grown + piece
            drafts.begin([3, 4, 5])
            limits = [DraftLimits(9, 9), DraftLimits(3, 2)]
            drafts.draft("text", [2, 0], [grown, grown[::-1]], limits, members, enough, 6)
            seen.append([_plain(drafts.tree(i)) for i in range(3)])
            seen.append([drafts.expected(i) for i in range(3)])
            drafts.learn(5, [1, 2])
        found.append(seen)
    assert found[0] == found[1]


@pytest.mark.parametrize("drafts", [native.Drafts(), Drafts()], ids=["native", "python"])
def test_no_token_from_outside_of_the_vocabulary_is_drafted(drafts: Any) -> None:
    members = texts(isinstance(drafts, native.Drafts), 1)
    drafts.begin([0])
    with pytest.raises((ValueError, ProposerError), match="not in the vocabulary"):
        drafts.draft("text", [0], [[7, 8, 7, 8, 7]], [DraftLimits(4, 4)], members, 9.0, 8)


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


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"token_ids": [5]}, ValueError, "differ in length"),
        ({"accept_probs": [0.5]}, ValueError, "differ in length"),
        ({"origins": ["a"]}, ValueError, "differ in length"),
        ({"parents": [ROOT, 1]}, ValueError, "parent of draft node 1 is 1"),
        ({"parents": [ROOT, -2]}, ValueError, "parent of draft node 1 is -2"),
        ({"parents": [ROOT, "a"]}, TypeError, "str"),
        ({"accept_probs": [0.5, "a"]}, TypeError, "str"),
        ({"token_ids": ["a", 6]}, TypeError, "integer"),
        ({"origins": [[], []]}, TypeError, "unhashable"),
        ({"origins": 5}, TypeError, "no sequence"),
    ],
)
def test_faulty_trees_are_not_taken_in(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    drafts = native.Drafts()
    drafts.begin([0])
    tree = DraftTree.chain([5, 6], [0.5, 0.5], "suffix")
    with pytest.raises(error, match=message):
        drafts.add(0, "suffix", replace(tree, **changes))
    assert drafts.sizes() == [0]


LIMITS = [DraftLimits(4, 4)]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda d: d.begin(5), TypeError, "no sequence"),
        (lambda d: d.add(1, "x", DraftTree()), IndexError, "no request"),
        (lambda d: d.add(0, "x", 5), AttributeError, "token_ids"),
        (lambda d: d.expected(7), IndexError, "no request"),
        (lambda d: d.tree(7), IndexError, "no request"),
        (lambda d: d.gain("x", [7], 0.0), IndexError, "no request"),
        (lambda d: d.learn(0, []), ValueError, "emitted nothing"),
        (lambda d: d.estimate(0, "suffix", -1, 0.5), ValueError, "below 0"),
        (lambda d: d.choose([], [1.0], 0.1, node_budget=1), ValueError, "differ in number"),
        (lambda d: d.choose([None], [1.0], 0.1, node_budget=1), AttributeError, "max_nodes"),
        (lambda d: d.choose(LIMITS, ["a"], 0.1, node_budget=1), TypeError, "str"),
        (lambda d: d.choose(LIMITS, 5, 0.1, node_budget=1), TypeError, "no sequence"),
        (
            lambda d: d.choose(LIMITS, [1.0], 0.1, slowdown="a", node_budget=1),
            TypeError,
            "str",
        ),
        (
            lambda d: d.choose(LIMITS, [1.0], 0.1, ahead=[1.0, 1.0], node_budget=1),
            ValueError,
            "differ in number",
        ),
        (lambda d: d.draft("x", [0], [], LIMITS, [], 1.0, 9), ValueError, "differ in number"),
        (lambda d: d.draft("x", [7], [[1]], LIMITS, [], 1.0, 9), IndexError, "no request"),
        (
            lambda d: d.draft("x", [0], [[1]], LIMITS, [("a", 1, 1)], 1.0, 9),
            ValueError,
            "four values",
        ),
        (
            lambda d: d.draft("x", [0], [[1]], LIMITS, [("a", 1, 1, [])], 1.0, 9),
            ValueError,
            "differ in number",
        ),
        (
            lambda d: d.draft("x", [0], [[1]], LIMITS, [("a", 1, 1, [5])], 1.0, 9),
            TypeError,
            "something else",
        ),
        (
            lambda d: d.draft("x", [0], [[1, -1]], LIMITS, texts(True, 1), 1.0, 9),
            ValueError,
            "token id",
        ),
    ],
)
def test_other_faulty_arguments_are_refused(
    call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    drafts = native.Drafts()
    drafts.begin([0])
    with pytest.raises(error, match=message):
        call(drafts)
    drafts.add(0, "x", DraftTree.chain([5], [0.5], "x"))
    assert drafts.sizes() == [1]
