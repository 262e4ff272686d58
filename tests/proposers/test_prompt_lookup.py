"""Prompt lookup against a slow model of what it promises, and the cases worth naming."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculativeConfig
from paceline.proposers.prompt_lookup import PromptIndex, PromptLookupProposer
from paceline.request.span import ROOT
from tests.proposers.drive import commit, make_request, propose
from tests.request.test_span import paths


def lookup(**options: Any) -> PromptLookupProposer:
    options = {"min_accept_prob": 0.0} | options
    return PromptLookupProposer(SpeculativeConfig(method="prompt_lookup", **options))


def test_continues_the_longest_match() -> None:
    # "1 2" occurs twice, "9 1 2" once: the longer match decides, not the later one.
    request = make_request(1, [9, 1, 2, 5, 6, 7, 8, 1, 2, 4, 4, 9, 1, 2])
    (tree,) = propose(lookup(), request)
    assert tree.token_ids == [5, 6, 7, 8]
    assert tree.parents == [ROOT, 0, 1, 2]
    assert set(tree.origins) == {"prompt_lookup"}


def test_no_match_no_draft() -> None:
    (tree,) = propose(lookup(), make_request(1, [1, 2, 3, 4, 5]))
    assert len(tree) == 0


def test_a_match_shorter_than_the_minimum_is_none() -> None:
    request = make_request(1, [3, 1, 2, 3])
    assert len(propose(lookup(prompt_lookup_min=2), request)[0]) == 0
    assert propose(lookup(prompt_lookup_min=1), request)[0].token_ids[0] == 1


def test_a_loop_is_continued_past_the_end_of_the_context() -> None:
    (tree,) = propose(lookup(num_speculative_tokens=7), make_request(1, [5, 1, 2, 1, 2]))
    assert tree.token_ids == [1, 2, 1, 2, 1, 2, 1]


def test_the_majority_of_occurrences_is_drafted() -> None:
    prompt = [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]
    (chain,) = propose(lookup(num_speculative_tokens=1), make_request(1, prompt))
    assert chain.token_ids == [7]
    (unanimous,) = propose(
        lookup(num_speculative_tokens=1), make_request(2, [1, 2, 7] * 3 + [1, 2])
    )
    assert unanimous.accept_probs[0] > chain.accept_probs[0]


def test_the_latest_occurrence_wins_a_tie() -> None:
    (tree,) = propose(lookup(), make_request(1, [1, 2, 7, 0, 1, 2, 8, 0, 1, 2]))
    assert tree.token_ids[0] == 8


def test_disagreement_becomes_a_tree() -> None:
    proposer = lookup(max_tree_nodes=7, max_branching=3, num_speculative_tokens=3)
    prompt = [1, 2, 7, 5, 6, 1, 2, 8, 5, 6, 1, 2, 7, 5, 9, 1, 2]
    (tree,) = propose(proposer, make_request(1, prompt))
    tree.validate(10)
    assert {(7,), (8,), (7, 5), (7, 5, 6), (7, 5, 9)} <= set(paths(tree))
    assert tree.path_probs() == sorted(tree.path_probs(), reverse=True)


def test_hopeless_tokens_are_not_drafted_not_even_the_first() -> None:
    disputed = [1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2, 8, 1, 2]
    assert len(propose(lookup(), make_request(1, disputed))[0]) == 4
    assert len(propose(lookup(min_accept_prob=0.3), make_request(1, disputed))[0]) == 0
    once = [1, 2, 3, 4, 5, 1, 2]
    assert 0 < len(propose(lookup(min_accept_prob=0.1), make_request(2, once))[0]) < 4


def test_longer_matches_are_surer() -> None:
    text = list(range(10, 40))
    sure = [
        propose(lookup(), make_request(n, [*text, 1, *text[:n]]))[0].accept_probs[0]
        for n in (2, 3, 4, 6, 10, 20)
    ]
    assert sure == sorted(sure)
    assert sure[0] < 0.5 < 0.9 < sure[-1]


def test_matches_beyond_the_window_are_not_found() -> None:
    request = make_request(1, [1, 2, 3, *range(10, 30), 1, 2])
    assert propose(lookup(prompt_lookup_window=25), request)[0].token_ids[0] == 3
    assert len(propose(lookup(prompt_lookup_window=24), request)[0]) == 0


def test_committed_tokens_are_known_in_the_next_step() -> None:
    proposer, request = lookup(), make_request(1, [1, 2, 3])
    propose(proposer, request)
    commit(proposer, request, [4, 1, 2])
    assert propose(proposer, request)[0].token_ids[:2] == [3, 4]


def expected_first(tokens: list[int], window: int, low: int, high: int) -> set[int]:
    """What may be drafted first: by the definition, without an index."""
    end = len(tokens)
    for n in range(min(high, end - 1), low - 1, -1):
        ends = [
            at
            for at in range(max(n, end - window + n), end)
            if tokens[at - n : at] == tokens[end - n :]
        ]
        if ends:
            return {tokens[at] for at in ends[-4:]}
    return set()


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=12))
@pytest.mark.parametrize("window", [6, 1000])
def test_the_index_finds_what_a_scan_finds(window: int, pieces: list[list[int]]) -> None:
    proposer = lookup(
        prompt_lookup_min=1,
        prompt_lookup_max=3,
        prompt_lookup_window=window,
        max_tree_nodes=16,
        max_branching=4,
        num_speculative_tokens=2,
    )
    request = make_request(1, pieces[0])
    for piece in [*pieces[1:], [0]]:
        (tree,) = propose(proposer, request)
        first = {t for t, p in zip(tree.token_ids, tree.parents, strict=True) if p == ROOT}
        assert first == expected_first(request.token_ids, window, 1, 3)
        commit(proposer, request, piece)


def test_an_index_covers_twice_its_window_at_most() -> None:
    index, tokens = PromptIndex(2, 4, 50), list[int]()
    for token in range(1000):
        tokens.append(token % 97)
        index.extend(tokens)
        assert len(index) <= 100


def test_a_finished_request_is_forgotten() -> None:
    proposer = lookup(prompt_lookup_min=1)
    first, second = make_request(1, [5, 6, 7, 5]), make_request(1, [1, 2, 3, 5, 8, 9, 5])
    assert propose(proposer, first)[0].token_ids[0] == 6
    proposer.finish(first)
    assert propose(proposer, second)[0].token_ids[0] == 8
