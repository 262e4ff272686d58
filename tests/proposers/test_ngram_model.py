"""Drafts by a trained n-gram model: which they are, how likely, and what the text at hand adds."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends.native.native import native_module, why_not_native
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.core.errors import ConfigError
from paceline.proposers import build_proposers
from paceline.proposers.base import TargetInfo
from paceline.proposers.ngram_model import (
    MAX_OCCURRENCES,
    NgramLookup,
    NgramModelProposer,
    NgramText,
    TextCache,
    write_tables,
)
from tests.proposers.drive import commit, make_request, propose
from tests.proposers.ngrams import ngram_config, toy_tables, train

TEXT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 0, 4, 3, 2, 1] * 2
ALL = 1 << 20
IMPLEMENTATIONS = [False, *([True] if why_not_native() is None else [])]


def test_a_tree_has_the_likeliest_paths_best_first() -> None:
    lookup = NgramLookup(train([TEXT], 3, vocab_size=5))
    tail = [3, 1]
    tokens, parents, probs = lookup.draft(None, tail, ALL, 3, 5, 1e-9)
    paths: dict[tuple[int, ...], float] = {}
    nodes: list[tuple[int, ...]] = []
    for token, parent, prob in zip(tokens, parents, probs, strict=True):
        above = nodes[parent] if parent >= 0 else ()
        nodes.append((*above, token))
        # A node's estimate is its probability where it stands, and a path's the product.
        assert prob == pytest.approx(lookup.probability([*tail, *above][-4:], token))
        paths[nodes[-1]] = paths.get(above, 1.0) * prob
    assert all(a >= b for a, b in pairwise(paths.values()))
    assert set(paths) == set(paths_after(tuple(tail), 3))


def paths_after(context: tuple[int, ...], depth: int) -> Iterator[tuple[int, ...]]:
    """Every path whose tokens followed the last one or two tokens somewhere in the text."""
    places = [(length, at) for length in (1, 2) for at in range(len(TEXT) - length)]
    known = {TEXT[at + n] for n, at in places if tuple(TEXT[at : at + n]) == context[-n:]}
    for token in known:
        yield (token,)
        for rest in paths_after((*context, token), depth - 1) if depth > 1 else ():
            yield (token, *rest)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_a_smaller_budget_gives_the_beginning_of_the_same_tree(
    nodes: int, depth: int, branching: int, more: int
) -> None:
    lookup, cache = NgramLookup(toy_tables()), TextCache()
    cache.extend([3, 4, 5, 3, 4, 6], 0)
    small = lookup.draft(cache, [3, 4], nodes, depth, branching, 0.0)
    large = lookup.draft(cache, [3, 4], nodes + more, depth, branching, 0.0)
    assert [column[: len(small[0])] for column in large] == list(small)
    assert len(small[0]) <= nodes
    assert max(small[1].count(parent) for parent in set(small[1])) <= branching


def test_unlikely_paths_are_left_out() -> None:
    lookup = NgramLookup(train([TEXT], 3, vocab_size=5))
    tokens, parents, probs = lookup.draft(None, [1, 2], ALL, 8, 5, 0.1)
    reached: list[float] = []
    for parent, prob in zip(parents, probs, strict=True):
        reached.append(prob * (reached[parent] if parent >= 0 else 1.0))
    assert tokens
    assert min(reached) >= 0.1


@pytest.mark.parametrize("is_backoff", [False, True])
@pytest.mark.parametrize("order", [2, 3, 5])
def test_the_native_look_ups_draft_alike(order: int, is_backoff: bool) -> None:
    if (reason := why_not_native()) is not None:
        pytest.skip(reason)
    native, dice = native_module(), random.Random(order)
    texts = [[min(dice.randrange(1, 9), dice.randrange(1, 9)) for _ in range(200)] for _ in "ab"]
    tables = train(texts, order, vocab_size=9, top_k=3)
    # Files of earlier versions may have relative frequencies.
    tables = dataclasses.replace(tables, is_backoff=is_backoff)
    ours = NgramLookup(tables)
    theirs = native.NgramLookup(tables.levels, tables.unigrams, tables.is_backoff)
    text = [dice.randrange(10) for _ in range(120)]
    for window in (0, 20, 200):
        mine = NgramText(ours, window, 4, 0.01)
        other = native.NgramText(theirs, window, 4, 0.01)
        for end in range(1, len(text), 7):
            limits = text[:end], dice.randint(1, 20), dice.randint(1, 6)
            assert other.draft(*limits) == mine.draft(*limits)


def test_the_text_at_hand_is_followed() -> None:
    proposer = NgramModelProposer(ngram_config(), toy_tables())
    phrase = [21, 22, 23, 24, 25, 26]  # nothing that the model was trained on
    request = make_request(1, [*phrase, 9, *phrase[:3]])
    (tree,) = propose(proposer, request)
    assert tree.token_ids[:3] == phrase[3:6]
    once = tree.accept_probs[0]
    commit(proposer, request, [*phrase[3:], 9, *phrase[:3]])
    (tree,) = propose(proposer, request)
    assert tree.token_ids[:3] == phrase[3:6]
    assert tree.accept_probs[0] > once  # the second time it is surer
    without = NgramModelProposer(ngram_config(ngram_window=0), toy_tables())
    assert phrase[3] not in propose(without, request)[0].token_ids


def test_witten_and_bell_s_rule() -> None:
    """After 7 came 8, 8 and 9: c / (C + T), and T / (C + T) for what the model had said."""
    tables = train([[1, 2] * 8 + [7, 8]], 2, vocab_size=10)
    lookup, cache = NgramLookup(tables), TextCache()
    cache.extend([7, 8, 7, 8, 7, 9, 7], 0)
    tokens, _, probs = lookup.draft(cache, [7], ALL, 1, 9, 0.0)
    for token, count in ((8, 2), (9, 1)):
        expected = (count + 2 * lookup.probability([7], token)) / (3 + 2)
        assert probs[tokens.index(token)] == pytest.approx(expected)


def test_occurrences_are_the_latest() -> None:
    cache = TextCache()
    cache.extend([5, 1] * 20 + [5, 2], 0)
    assert cache.followers((5,)) == [2, *[1] * (MAX_OCCURRENCES - 1)]
    assert cache.followers((1, 5)) == [2, *[1] * (MAX_OCCURRENCES - 1)]
    assert cache.followers((2,)) == []


@pytest.mark.parametrize("is_native", IMPLEMENTATIONS)
@pytest.mark.parametrize(("window", "is_far"), [(8, False), (1000, True)])
def test_the_own_text_counts_as_far_back_as_the_window(
    window: int, is_far: bool, is_native: bool
) -> None:
    config = ngram_config(ngram_window=window)
    proposer = NgramModelProposer(config, toy_tables(), is_native=is_native)
    request = make_request(1, [45, 46], max_len=1000)
    propose(proposer, request)
    for at in range(200):
        commit(proposer, request, [at % 7])
    commit(proposer, request, [45])
    (tree,) = propose(proposer, request)
    assert (46 in tree.token_ids) == is_far


@pytest.mark.parametrize("is_native", IMPLEMENTATIONS)
def test_a_finished_request_is_forgotten(is_native: bool) -> None:
    proposer = NgramModelProposer(ngram_config(), toy_tables(), is_native=is_native)
    first, second = make_request(1, [45, 46, 45]), make_request(1, [0, 1, 45])
    assert 46 in propose(proposer, first)[0].token_ids
    proposer.finish(first)
    assert 46 not in propose(proposer, second)[0].token_ids


def test_it_is_built_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "toy.ngram"
    write_tables(toy_tables(), path)
    (config,) = parse_speculative_config({"method": "ngram_model", "model": str(path)})
    target = TargetInfo(48, None, "cpu", 64, 2, 0)
    (proposer,) = build_proposers([config], target, strict=True)
    assert proposer.name == "ngram_model"
    assert propose(proposer, make_request(1, [3, 4, 3, 4]))[0].token_ids
    small = TargetInfo(40, None, "cpu", 64, 2, 0)
    with pytest.raises(ConfigError, match="train one with the target's tokenizer"):
        build_proposers([config], small, strict=True)
    assert build_proposers([config], small, strict=False) == []


def test_the_file_must_be_named() -> None:
    with pytest.raises(ConfigError, match="paceline train ngram"):
        SpeculativeConfig(method="ngram_model")


@pytest.mark.parametrize("spoiled", ["buckets", "starts", "lower_weights", "values"])
def test_native_tables_must_go_together(spoiled: str) -> None:
    if (reason := why_not_native()) is not None:
        pytest.skip(reason)
    tables = toy_tables()
    level = tables.levels[0]
    broken = dataclasses.replace(level, **{spoiled: getattr(level, spoiled)[:-1]})
    with pytest.raises(ValueError, match="go together"):
        native_module().NgramLookup((broken,), tables.unigrams, False)
