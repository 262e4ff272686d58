"""The native prompt lookup against the one in Python, which it must equal."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculativeConfig
from paceline.proposers.prompt_lookup import PromptLookupProposer
from tests.proposers.drive import commit, make_request, propose

native = pytest.importorskip("paceline._native", reason="the native kernels are not built")


def drafts(is_native: bool, pieces: list[list[int]], **options: Any) -> list[Any]:
    """What is drafted below a text after each of its pieces."""
    config = SpeculativeConfig(method="prompt_lookup", **options)
    proposer = PromptLookupProposer(config, is_native)
    request = make_request(1, pieces[0])
    found = propose(proposer, request)
    for piece in pieces[1:]:
        commit(proposer, request, piece)
        found += propose(proposer, request)
    return found


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=12),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    window=st.sampled_from([1, 2, 5, 9, 1000]),
    depth=st.integers(1, 9),
    nodes=st.sampled_from([0, 3, 16]),
    branching=st.integers(1, 4),
    least=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_it_drafts_the_same(
    pieces: list[list[int]],
    shortest: int,
    more: int,
    window: int,
    depth: int,
    nodes: int,
    branching: int,
    least: float,
) -> None:
    options = {
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": shortest + more,
        "prompt_lookup_window": window,
        "num_speculative_tokens": depth,
        "max_tree_nodes": nodes,
        "max_branching": branching if nodes else 1,
        "min_accept_prob": least,
    }
    assert drafts(True, pieces, **options) == drafts(False, pieces, **options)


@pytest.mark.parametrize("window", [300, 8192])
def test_it_drafts_the_same_in_long_texts(window: int) -> None:
    """With long copies, for which a match is measured beyond the longest key."""
    rng = random.Random(window)
    text = [rng.randrange(1 << 31) for _ in range(80)]
    for _ in range(60):
        at = rng.randrange(len(text) - 40)
        text += text[at : at + rng.randrange(3, 40)] + [rng.randrange(9)] * rng.randrange(3)
    pieces = [text[:100], *[[token] for token in text[100:]]]
    options = {
        "prompt_lookup_window": window,
        "num_speculative_tokens": 8,
        "max_tree_nodes": 16,
        "max_branching": 3,
    }
    assert drafts(True, pieces, **options) == drafts(False, pieces, **options)


def test_what_is_no_token_is_refused() -> None:
    drafter = native.PromptDrafter([[0.5] * 99] * 4, {(1, 1): 0.2}, 1, 0.0)
    text = native.PromptText(drafter, 1, 4, 100)
    for wrong in (-1, 1 << 32, "1", None):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            text.draft([1, 2, wrong], 4, 4)
    assert text.draft([1, 2, 1], 4, 1) == ([2], [-1], [0.5])
