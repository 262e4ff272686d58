"""What the target's noise says of candidates: whose noise it is, and that drafts use it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.backends.native.native import native_module, why_not_native
from paceline.proposers.base.noise import NO_NOISE, TargetNoise, noise_of
from paceline.proposers.suffix import SuffixProposer
from paceline.request.request import Request
from paceline.sampling.sampler import token_noise
from tests.proposers.drive import make_request, propose
from tests.proposers.ngrams import ngram_proposer
from tests.toy import suffix_config

NATIVE = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
TOKENS = np.arange(48)


def gumbel(seed: int, position: int, sample: int = 0) -> np.ndarray[Any, Any]:
    rows = np.zeros(len(TOKENS), np.int64)
    whose = (np.array([value], np.uint64) for value in (seed, position, sample))
    return token_noise(*whose, rows, TOKENS)


def test_it_is_the_noise_that_the_sampler_adds() -> None:
    for seed, position, sample in ((5, 7, 0), (2**64 - 1, 70_000, 3)):
        noise = TargetNoise(seed, sample, 0.5, math.gamma(0.5))
        factors = [noise.factor(position, token) for token in TOKENS.tolist()]
        assert factors == pytest.approx(np.exp(0.5 * gumbel(seed, position, sample)).tolist())


@NATIVE
def test_both_programs_have_the_same_to_the_last_bit() -> None:
    for whose in ((0, 0), (2**64 - 1, 127), (0x0123456789ABCDEF, 1)):
        mine, other = (
            make(*whose, 0.48, math.gamma(0.52))
            for make in (TargetNoise, native_module().TargetNoise)
        )
        for position in (0, 1, 4095, 2**31):
            assert [mine.factor(position, t) for t in range(40)] == [
                other.factor(position, t) for t in range(40)
            ]


def test_on_average_it_says_nothing() -> None:
    noise = TargetNoise(3, 0, 0.3, math.gamma(0.7))
    factors = [noise.factor(position, 1) for position in range(20_000)]
    assert sum(factors) / len(factors) == pytest.approx(math.gamma(0.7), rel=0.02)


def test_what_is_left_to_other_tokens_weighs_as_much_as_their_noise_does_on_average() -> None:
    noise = TargetNoise(3, 0, 0.5, math.gamma(0.5))
    probs = noise.weighed(9, {1: 0.5, 2: 0.3})
    first, second = 0.5 * noise.factor(9, 1), 0.3 * noise.factor(9, 2)
    total = first + second + 0.2 * math.gamma(0.5)
    assert probs == pytest.approx({1: first / total, 2: second / total})


def test_nothing_is_known_of_what_is_not_sampled() -> None:
    assert noise_of(make_request(1, [1]))[2] == 0.0
    assert NO_NOISE.weighed(3, {4: 0.5}) == {4: 0.5}


def test_the_hotter_the_more_it_counts() -> None:
    weights = [noise_of(make_request(1, [1], temperature=t))[2] for t in (0.2, 0.8, 1.0, 5.0)]
    assert weights == sorted(weights)
    assert 0.0 < weights[0] < weights[-1] < 1.0


@pytest.mark.parametrize(
    "make",
    [lambda: SuffixProposer(suffix_config(), False), lambda: ngram_proposer(is_native=False)],
    ids=["suffix", "ngram_model"],
)
def test_candidates_are_right_more_often_with_it(make: Callable[[], Any]) -> None:
    """After 40 comes one of four tokens, drawn with the noise; the text has all of them alike."""
    text = [36, 40, 42, 37, 40, 43, 38, 40, 44, 39, 40, 45, 46, 40]
    right = {0.0: 0, 1.0: 0}
    for temperature in right:
        for number in range(60):
            request: Request = make_request(number, text, temperature=temperature)
            drawn = 42 + int(np.argmax(gumbel(request.seed, len(text))[42:46]))
            tree = propose(make(), request, depth=1)[0]
            best = max(range(len(tree)), key=lambda node: tree.accept_probs[node])
            right[temperature] += tree.token_ids[best] == drawn
    assert right[0.0] < 30 < 40 < right[1.0]


@NATIVE
def test_native_drafts_use_it_alike() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 5, 3, 1, 2, 3, 4, 1]
    for temperature in (0.0, 0.3, 0.8, 2.0):
        request = make_request(4, text, temperature=temperature)
        for make in (
            lambda is_native: SuffixProposer(suffix_config(), is_native),
            lambda is_native: ngram_proposer(is_native=is_native),
        ):
            mine, other = (propose(make(is_native), request)[0] for is_native in (False, True))
            assert mine.accept_probs
            assert mine == other
