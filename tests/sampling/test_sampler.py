"""The sampler: known answers of the noise, filters against brute force, and its distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.sampling import sampler
from paceline.sampling.logit_edits import SamplingRow, edit_logits
from paceline.sampling.sampler import (
    philox,
    rank_candidates,
    sample_tokens,
    token_logprobs,
    token_noise,
)


@pytest.fixture(params=["native", "numpy"], autouse=True, scope="module")
def _path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds with the native kernels and without them."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(sampler, "kernels", None)
        elif sampler.kernels is None:
            pytest.skip("the native kernels are not built")
        yield


def request(params: SamplingParams, seed: int = 0, tokens: Any = (1, 2), index: int = 0) -> Request:
    return Request(
        request_id=index,
        token_ids=list(tokens),
        prompt_len=1,
        params=params,
        seed=seed,
        max_len=100,
        eos_token_ids=frozenset([0]),
        sample_index=index,
    )


def test_philox_known_answers() -> None:
    """The reference vectors of the Random123 distribution."""

    def words(*values: int) -> list[Any]:
        return [np.asarray([v], dtype=np.uint64) for v in values]

    key, *counter = words(0, 0, 0, 0, 0)
    got = [int(w[0]) for w in philox(key, *counter)]
    assert got == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    full = 0xFFFFFFFF
    key, *counter = words(2**64 - 1, full, full, full, full)
    got = [int(w[0]) for w in philox(key, *counter)]
    assert got == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    key, *counter = words(0x299F31D0A4093822, 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    got = [int(w[0]) for w in philox(key, *counter)]
    assert got == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def scalar_noise(seed: int, position: int, sample: int, token: int) -> float:
    """The formula of the noise, one token at a time, in Python integers."""
    k = [seed & 0xFFFFFFFF, seed >> 32]
    c = [position, token // 4, sample, 0]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    u = (c[token % 4] + 0.5) * 2.0**-32
    return -math.log(-math.log(u))


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31),
    st.integers(0, 15),
    st.lists(st.integers(0, 200_000), min_size=1, max_size=20, unique=True).map(sorted),
)
def test_noise_is_the_documented_formula(
    seed: int, position: int, sample: int, tokens: list[int]
) -> None:
    got = token_noise(
        np.asarray([seed], dtype=np.uint64),
        np.asarray([position], dtype=np.uint64),
        np.asarray([sample], dtype=np.uint64),
        np.zeros(len(tokens), dtype=np.int64),
        np.asarray(tokens),
    )
    want = [scalar_noise(seed, position, sample, t) for t in tokens]
    np.testing.assert_allclose(got, want, rtol=1e-12)


def slow_choice(z: np.ndarray[Any, Any], row: SamplingRow) -> int:
    """The rule, spelled out over a sorted list."""
    params, size = row.sampling, len(z)
    order = sorted(range(size), key=lambda i: (-z[i], i))
    scaled = [float(z[i]) / params.temperature for i in order]
    kept = order[: params.top_k] if 0 < params.top_k < size else list(order)
    weights = [math.exp(s - scaled[0]) for s in scaled[: len(kept)]]
    total, before, survivors = sum(weights), 0.0, []
    for token, weight in zip(kept, weights, strict=True):
        if before < params.top_p * total and weight >= params.min_p:
            survivors.append(token)
        before += weight
    noise = [
        scalar_noise(row.request.seed, row.position, row.request.sample_index, t) for t in survivors
    ]
    scores = [float(z[t]) / params.temperature + g for t, g in zip(survivors, noise, strict=True)]
    return survivors[scores.index(max(scores))]


@pytest.mark.parametrize("vocab", [3, 40, 700, 5000])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"top_k": 300, "top_p": 0.95},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
        {"temperature": 0.01},
    ],
)
def test_sampling_against_the_rule_spelled_out(vocab: int, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(vocab)
    params = SamplingParams(**{"temperature": 0.8} | options)
    for trial in range(3):
        # Coarse values, so that ties at the filters' edges are common.
        logits = np.round(rng.normal(size=(3, vocab)) * 8).astype(np.float32) / 4
        rows = [SamplingRow(request(params, seed=trial * 7 + i, index=i)) for i in range(3)]
        got, valid = sample_tokens(logits, rows)
        assert all(valid)
        want = [slow_choice(z, row) for z, row in zip(logits, rows, strict=True)]
        assert got == want


def test_a_row_does_not_depend_on_its_company() -> None:
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(4, 3000)) * 3).astype(np.float32)
    options: list[dict[str, Any]] = [{}, {"top_k": 900}, {"top_p": 0.5}, {"min_p": 0.2}]
    rows = [
        SamplingRow(request(SamplingParams(temperature=0.9, **o), seed=i, index=i))
        for i, o in enumerate(options)
    ]
    together = sample_tokens(logits, rows)[0]
    alone = [sample_tokens(logits[i : i + 1], [rows[i]])[0][0] for i in range(4)]
    assert together == alone


@cache
def requests(number: int) -> list[Request]:
    return [
        request(SamplingParams(), seed=s, tokens=[1] * (2 + s % 5), index=s % 3)
        for s in range(number)
    ]


def frequencies(logits: np.ndarray[Any, Any], params: SamplingParams, draws: int) -> Any:
    rows = [SamplingRow(each, params=params) for each in requests(draws)]
    tokens, _ = sample_tokens(np.tile(logits, (draws, 1)).astype(np.float32), rows)
    return np.bincount(tokens, minlength=len(logits))


def chi_square(counts: Any, probs: Any) -> float:
    expected = np.asarray(probs) * counts.sum()
    live = expected > 0
    assert counts[~live].sum() == 0, "a token of probability zero was drawn"
    return float(((counts - expected)[live] ** 2 / expected[live]).sum())


LIMIT = 20.0  # chi-square with 2 degrees of freedom exceeds this once in 22,000 tries
LOGITS = np.log([0.5, 0.3, 0.2])
DRAWS = 5_000


@pytest.mark.parametrize(
    ("options", "probs"),
    [
        ({}, [0.5, 0.3, 0.2]),
        ({"temperature": 0.5}, np.asarray([0.25, 0.09, 0.04]) / 0.38),
        ({"top_k": 2}, [0.625, 0.375, 0.0]),
        ({"top_p": 0.75}, [0.625, 0.375, 0.0]),
        ({"top_p": 0.5}, [1.0, 0.0, 0.0]),
        ({"min_p": 0.5}, [0.625, 0.375, 0.0]),
        ({"logit_bias": {2: math.log(2.5)}}, np.asarray([0.5, 0.3, 0.5]) / 1.3),
        ({"banned_token_ids": (0,)}, [0.0, 0.6, 0.4]),
        ({"allowed_token_ids": (0, 2)}, [5 / 7, 0.0, 2 / 7]),
    ],
)
def test_distribution_on_three_tokens(options: dict[str, Any], probs: Any) -> None:
    counts = frequencies(LOGITS, SamplingParams(**options), DRAWS)
    assert chi_square(counts, probs) < LIMIT


def test_a_biased_sampler_fails_the_same_check() -> None:
    """The control: classic rejection of a pruned draft, whose output is (11/20, 9/20)."""
    rng = np.random.default_rng(0)
    counts = np.bincount(rng.choice(2, size=DRAWS, p=[0.55, 0.45]), minlength=2)
    assert chi_square(counts, [0.5, 0.5]) > LIMIT


def test_penalties_follow_their_definitions() -> None:
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, temperature=0.0
    )
    row = SamplingRow(request(params, tokens=[1, 2, 2, 3]), path=[2, 4])
    logits = np.asarray([[0.0, 1.0, 2.0, -1.0, 4.0, 5.0]], dtype=np.float32)
    got = edit_logits(logits, [row])[0]
    # token 1 is prompt only: repetition; 2 occurs three times in output and path; 3 and 4 once
    want = [0.0, 0.5, 1.0 - 0.75 - 0.5, -2.0 - 0.25 - 0.5, 2.0 - 0.25 - 0.5, 5.0]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert logits[0, 2] == 2.0, "the raw logits must stay"


def test_min_tokens_counts_the_path() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(2,))
    logits = np.asarray([[9.0, 0.0, 8.0]], dtype=np.float32)
    base = request(params)  # one output token
    assert sample_tokens(logits, [SamplingRow(base, [1])])[0][0] == 1
    assert sample_tokens(logits, [SamplingRow(base, [1, 1])])[0][0] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_reported(bad: float, temperature: float) -> None:
    logits = np.zeros((2, 8), dtype=np.float32)
    logits[1, 3] = bad
    params = SamplingParams(temperature=temperature)
    _, valid = sample_tokens(logits, [SamplingRow(request(params, index=i)) for i in range(2)])
    assert valid == [True, False]


def test_everything_masked_is_reported() -> None:
    params = SamplingParams(allowed_token_ids=(1,), banned_token_ids=(1,))
    # the allowed token is banned first, so nothing is left
    _, valid = sample_tokens(np.zeros((1, 4), np.float32), [SamplingRow(request(params))])
    assert not valid[0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_first_candidate_is_what_the_sampler_emits(temperature: float) -> None:
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(5, 900)) * 2).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_p=0.95)
    rows = [SamplingRow(request(params, seed=i, index=i)) for i in range(5)]
    tokens, scores = rank_candidates(logits, rows, 4)
    assert tokens[:, 0].tolist() == sample_tokens(logits, rows)[0]
    assert (np.diff(scores, axis=1) <= 0).all()


def test_logprobs_are_the_log_softmax_of_raw_logits() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 50), np.float32)
    found = token_logprobs(logits, [4, 5, 6], [2, 0, 3])
    table = torch.log_softmax(torch.from_numpy(logits), dim=-1)
    for i, entry in enumerate(found):
        assert entry.logprob == pytest.approx(table[i, 4 + i].item(), abs=1e-6)
        assert entry.rank == int((table[i] > table[i, 4 + i]).sum()) + 1
        best = table[i].topk(3)
        assert [t for t, _ in entry.top] == best.indices[: len(entry.top)].tolist()
    assert [len(e.top) for e in found] == [2, 0, 3]


def test_row_parameters_can_differ_from_the_requests() -> None:
    base = request(SamplingParams(temperature=1.0))
    row = SamplingRow(base, params=replace(base.params, temperature=0.0))
    logits = np.asarray([[0.0, 3.0, 1.0]], dtype=np.float32)
    assert sample_tokens(logits, [row])[0][0] == 1


def test_a_mask_comes_before_every_other_edit() -> None:
    """What a grammar forbids stays forbidden; what it allows keeps its share."""
    logits = np.asarray([[3.0, 2.0, 1.0, 0.0]], np.float32)
    params = SamplingParams(temperature=0.0, logit_bias={0: 50.0, 3: 1.5}, repetition_penalty=2.0)
    one = SamplingRow(request(params), [1], mask=bytes([0b1110]))
    edited = edit_logits(logits, [one])
    assert edited.tolist() == [[-np.inf, 1.0, 0.5, 1.5]]
    assert sample_tokens(logits, [one])[0] == [3]
    _, valid = sample_tokens(logits, [SamplingRow(request(params), mask=bytes(1))])
    assert valid == [False]
