"""The native sampler against the numpy one, at every instruction-set level.

tests/sampling/test_sampler.py checks both against the rule itself; here is what could differ
between them: odd widths, ties, edges of the filters, the bound that spares logarithms, threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.sampling import sampler as packing
from paceline.sampling.logit_edits import SamplingRow
from paceline.sampling.sampler import (
    argmax_rows,
    philox,
    rank_candidates,
    sample_tokens,
    token_logprobs,
    token_noise,
)
from tests.quick import once

native = pytest.importorskip("paceline._native", reason="the native kernels are not built")

pytestmark = pytest.mark.usefixtures("isa")
Logits = npt.NDArray[np.float32]
EOS = frozenset([0])


@pytest.fixture
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls a function of the sampler without the extension."""

    def call(function: Callable[..., Any], *args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(packing, "kernels", None)
            return function(*args)

    return call


def row(
    seed: int = 0, tokens: Sequence[int] = (0, 0), path: Sequence[int] = (), **options: Any
) -> SamplingRow:
    request = Request(
        request_id=seed,
        token_ids=list(tokens),
        prompt_len=max(1, len(tokens) // 2),
        params=SamplingParams(**{"temperature": 0.8} | options),
        seed=seed * 0x9E3779B97F4A7C15 % 2**64,
        max_len=10**6,
        eos_token_ids=EOS,
        sample_index=seed % 3,
    )
    return SamplingRow(request, path)


def shapes(vocab: int, seed: int = 0) -> dict[str, Logits]:
    """Logits of several kinds, ``[3, vocab]`` each."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(3, vocab))
    peaky = noise * 2.5
    peaky[:, rng.choice(vocab, min(vocab, 100), replace=False)] += rng.gamma(
        4, 1.8, min(vocab, 100)
    )
    some = noise.copy()
    some[rng.random(some.shape) < 0.9] = -np.inf
    some[:, vocab // 2] = 0.5
    found = {
        "flat": noise,
        "peaky": peaky,
        "tied": np.round(noise * 4) / 2,
        "equal": np.zeros((3, vocab)) * -1.0,
        "mostly masked": some,
        "rising": np.sort(noise, axis=1) * 3,
        "wide": noise * 1e4,
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "presence_penalty": 0.1},
    {"temperature": 0.01},
    {"temperature": 100.0, "top_p": 0.5},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 700, "top_p": 0.9},
    {"top_p": 0.95},
    {"top_p": 0.3, "temperature": 1.5},
    {"top_p": 0.9999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
]


def assert_same_ranking(got: Any, want: Any) -> None:
    """Equal candidates; only those whose scores are a rounding apart may change places.

    Which of several equals is ranked last is left open: numpy's partition does not say.
    """
    np.testing.assert_allclose(got[1], want[1], rtol=1e-12, atol=1e-12)
    differ = (got[0] != want[0]) & np.isfinite(want[1]) & (want[1] != want[1][:, -1:])
    for i, j in np.argwhere(differ):
        at = np.flatnonzero(want[0][i] == got[0][i, j])
        assert len(at) == 1, f"row {i} ranks {got[0][i, j]}, which is none of {want[0][i]}"
        assert abs(want[1][i, at[0]] - got[1][i, j]) < 1e-11


def sampled(vocab: int, options: dict[str, Any], k: int) -> list[Any]:
    """Of each kind of logits the ``k`` best candidates and the tokens."""
    found = []
    for seed, logits in enumerate(shapes(vocab).values()):
        rows = [row(seed * 3 + i, **options) for i in range(3)]
        table = logits
        found.append((rank_candidates(table, rows, k), sample_tokens(logits, rows)))
    return found


@functools.cache
def sampled_by_numpy(vocab: int, at: int, k: int) -> list[Any]:
    """The same for every level, and so computed once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "kernels", None)
        return sampled(vocab, OPTIONS[at], k)


SIZES = [(1, 1), (3, 3), (48, 48), (63, 63), (1000, 1000), (4096, 300), (32_007, 8)]


@pytest.mark.parametrize(
    ("at", "size", "isa"),
    once(range(len(OPTIONS)), SIZES, native.isas(), times=3),
    indirect=["isa"],
)
def test_every_survivor_is_the_same(at: int, size: tuple[int, int]) -> None:
    vocab, k = size
    found = zip(sampled(vocab, OPTIONS[at], k), sampled_by_numpy(vocab, at, k), strict=True)
    for (ranking, tokens), (wanted_ranking, wanted_tokens) in found:
        assert_same_ranking(ranking, wanted_ranking)
        assert tokens == wanted_tokens


def masked(one: SamplingRow, vocab: int, seed: int) -> SamplingRow:
    """The row with some tokens allowed: all, half, few, one or none, or a mask that is short."""
    rng = np.random.default_rng(seed)
    share = (1.0, 0.5, 0.01, 0.0)[seed % 4]
    allowed = rng.random(vocab) < share
    if seed % 5:
        allowed[rng.integers(vocab)] = True
    mask = np.packbits(allowed, bitorder="little").tobytes()
    one.mask = mask[: len(mask) // 2] if seed % 7 == 6 else mask
    return one


@pytest.mark.parametrize("vocab", [65])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_under_a_grammar_s_mask(
    vocab: int, options: dict[str, Any], by_numpy: Callable[..., Any]
) -> None:
    for seed, logits in enumerate(shapes(vocab).values()):
        rows = [masked(row(seed * 3 + i, **options), vocab, seed * 3 + i) for i in range(3)]
        found = sample_tokens(logits, rows)
        assert found == by_numpy(sample_tokens, logits, rows)
        for token, valid, one in zip(*found, rows, strict=True):
            assert one.mask is not None
            assert not valid or one.mask[token // 8] >> token % 8 & 1
        fine = [i for i, valid in enumerate(found[1]) if valid]
        table, k = logits[fine], min(vocab, 48)
        rows = [rows[i] for i in fine]
        assert_same_ranking(
            rank_candidates(table, rows, k), by_numpy(rank_candidates, table, rows, k)
        )


def test_noise_is_the_philox_of_the_sampler() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        seed, position = int(rng.integers(2**64, dtype=np.uint64)), int(rng.integers(2**32))
        sample, first, count = (int(rng.integers(n)) for n in (16, 200_000, 300))
        tokens = np.arange(first, first + count + 1)
        key, c0, c1, c2, c3 = (
            np.full(len(tokens), x, dtype=np.uint64) for x in (seed, position, 0, sample, 0)
        )
        c1 = (tokens // 4).astype(np.uint64)
        words = np.stack(philox(key, c0, c1, c2, c3))[tokens % 4, np.arange(len(tokens))]
        got = native.noise_words(seed, position, sample, first, count + 1)
        assert got.ravel().tolist() == words.tolist()
    # the first of the known answers of the Random123 distribution
    assert native.noise_words(0, 0, 0, 0, 4).ravel().tolist() == [
        0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8,
    ]  # fmt: skip


@pytest.mark.parametrize("temperature", [1e-4, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("k", [1, 8])
def test_the_bound_never_drops_a_winner(temperature: float, k: int) -> None:
    """Against the noise of every token, logarithms and all."""
    vocab = 9000
    for seed, logits in enumerate(shapes(vocab, 3).values()):
        rows = [row(seed * 31 + i, temperature=temperature) for i in range(3)]
        got = rank_candidates(logits, rows, k)
        tokens = np.tile(np.arange(vocab), 3)
        owners = np.repeat(np.arange(3), vocab)
        noise = token_noise(
            np.asarray([r.request.seed for r in rows], dtype=np.uint64),
            np.asarray([r.position for r in rows], dtype=np.uint64),
            np.asarray([r.request.sample_index for r in rows], dtype=np.uint64),
            owners,
            tokens,
        )
        scores = logits / np.float64(temperature) + noise.reshape(3, vocab)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        assert_same_ranking(got, (order, np.take_along_axis(scores, order, axis=1)))


def test_a_row_is_a_function_of_itself(threads: int) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(6, 20_003)) * 3).astype(np.float32)
    kinds: list[dict[str, Any]] = [
        {}, {"top_k": 90}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.0},
        {"top_p": 0.9, "repetition_penalty": 1.3},
    ]  # fmt: skip
    rows = [row(i, tokens=range(i + 5), **kinds[i]) for i in range(6)]
    tokens, scores = rank_candidates(logits, rows, 5)
    for order in ([0], [5, 2], [4, 3, 1, 0, 2, 5]):
        some = [rows[i] for i in order]
        got = rank_candidates(logits[order], some, 5)
        assert got[0].tolist() == tokens[order].tolist()
        assert got[1].tobytes() == scores[order].tobytes()
        assert sample_tokens(logits, some, order)[0] == tokens[order, 0].tolist()


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.3, "presence_penalty": 1.1},
    {"logit_bias": {3: 5.0, 17: -100.0}, "banned_token_ids": (2, 3)},
    {"allowed_token_ids": (1, 5, 7, 1), "min_tokens": 6, "stop_token_ids": (5,)},
    {"min_tokens": 4, "presence_penalty": 2.0, "top_p": 0.8},
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("options", PENALTIES, ids=str)
def test_edits_follow_a_growing_request(
    temperature: float, options: dict[str, Any], by_numpy: Callable[..., Any]
) -> None:
    rng = np.random.default_rng(6)
    vocab = 50
    subject = row(7, [9, 9, 4, 4, 2], temperature=temperature, **options)
    tokens = subject.request.token_ids
    for step in range(12):
        logits = rng.normal(size=(3, vocab)).astype(np.float32)
        before = logits.copy()
        rows = [SamplingRow(subject.request, path) for path in ((), [int(step)], [4, 1, 4, 30])]
        table = logits
        assert_same_ranking(
            rank_candidates(table, rows, 10), by_numpy(rank_candidates, table, rows, 10)
        )
        assert sample_tokens(logits, rows) == by_numpy(sample_tokens, logits, rows)
        assert (logits == before).all(), "the raw logits must stay"
        tokens += rng.integers(0, vocab, size=step % 3).tolist()
        if step == 8:
            del tokens[6:]  # never done by the engine; the counts must not go stale all the same


def test_parameters_of_a_draft_are_kept_apart() -> None:
    base = row(1, temperature=1.0)
    logits = np.asarray([[0.0, 3.0, 1.0]], dtype=np.float32)
    for temperature in (0.0, 0.5, 0.0):
        other = SamplingRow(base.request, params=SamplingParams(temperature=temperature))
        native_tokens = sample_tokens(logits, [other])[0]
        assert temperature or native_tokens == [1]
    assert len(base.request.sampling_rules) <= packing.KEPT_RULES


def test_top_p_at_an_exact_edge() -> None:
    """Equal weights add up exactly: the token at which the mass before is top_p stays out."""
    logits = np.zeros((1, 100), np.float32)
    for top_p, count in ((0.25, 25), (0.5, 50), (0.251, 26), (1e-6, 1)):
        tokens, scores = rank_candidates(logits, [row(top_p=top_p)], 100)
        assert sorted(tokens[0, np.isfinite(scores[0])].tolist()) == list(range(count))


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_top_p_at_an_edge_that_the_far_tokens_decide(
    spread: float, by_numpy: Callable[..., Any]
) -> None:
    """Four tokens weigh 1 each, 4,996 others 0.1 at most together, which float32 only estimates."""
    rng = np.random.default_rng(11)
    logits = np.zeros((1, 5000), dtype=np.float32)
    heavy = rng.choice(5000, 4, replace=False)
    logits[0] = np.log(0.1 / 5000) - spread * rng.random(5000)
    logits[0, heavy] = 0.0
    edge = 3.0 / np.exp(logits[0].astype(np.float64)).sum()
    for share, count in ((1 - 1e-9, 3), (1 + 1e-9, 4), (1 - 1e-4, 3), (1 + 1e-4, 4)):
        rows = [row(3, temperature=1.0, top_p=edge * share)]
        got = rank_candidates(logits, rows, 8)
        assert sorted(got[0][0, np.isfinite(got[1][0])].tolist()) == sorted(heavy)[:count]
        assert_same_ranking(got, by_numpy(rank_candidates, logits, rows, 8))


@pytest.mark.parametrize("vocab", [5, 64, 1000])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"logit_bias": {0: 1}}]
)
def test_rows_that_allow_no_token(
    vocab: int, options: dict[str, Any], by_numpy: Callable[..., Any]
) -> None:
    logits = np.random.default_rng(8).normal(size=(6, vocab)).astype(np.float32)
    logits[1, 3] = np.nan
    logits[2, 2:4] = np.inf, np.nan
    logits[3, vocab - 1] = np.inf
    logits[4] = -np.inf
    rows = [row(i, **options) for i in range(6)]
    got = sample_tokens(logits, rows)
    assert got == by_numpy(sample_tokens, logits, rows)
    assert got[1] == [True, False, False, False, False, True]
    _, scores = rank_candidates(logits, rows, 2)
    assert np.isfinite(scores).all(axis=1).tolist() == got[1]


def test_argmax_is_the_lowest_of_equals() -> None:
    rng = np.random.default_rng(9)
    for vocab in (1, 16, 63, 64, 65, 5000):
        logits = rng.integers(-3, 4, size=(9, vocab)).astype(np.float32) * rng.choice([1, -1])
        assert argmax_rows(logits) == (logits.argmax(axis=1).tolist(), [True] * 9)


def test_logprobs(by_numpy: Callable[..., Any]) -> None:
    rng = np.random.default_rng(10)
    for vocab in (1, 5, 1000, 4099):
        logits = (rng.normal(size=(5, vocab)) * 4).astype(np.float32)
        logits[3, vocab // 2 + 1 :] = -np.inf
        ids, top = [0] * 5, [0, 1, 3, 20, 128]
        exact = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)
        got = token_logprobs(logits, ids, top)
        for i, (entry, want) in enumerate(zip(got, by_numpy(token_logprobs, logits, ids, top))):  # noqa: B905
            assert entry.token_id == want.token_id
            assert entry.rank == want.rank
            assert [t for t, _ in entry.top] == [t for t, _ in want.top]
            assert entry.logprob == np.float32(exact[i, 0].item())
            values = [v for _, v in entry.top]
            assert values == [np.float32(exact[i, t].item()) for t, _ in entry.top]
    (nothing,) = token_logprobs(np.full((1, 9), np.nan, np.float32), [4], [2])
    assert math.isnan(nothing.logprob)
    assert len(nothing.top) == 2


def test_what_does_not_fit_is_refused() -> None:
    logits = np.zeros((2, 10), dtype=np.float32)
    with pytest.raises(ValueError, match="differ in number"):
        sample_tokens(logits, [row()])
    with pytest.raises(ValueError, match="beyond the logits"):
        sample_tokens(logits, [row()], [2])
    with pytest.raises(ValueError, match="logit_bias hold token 10"):
        sample_tokens(logits[:1], [row(logit_bias={10: 1.0})])
    with pytest.raises(ValueError, match="paths hold token -1"):
        sample_tokens(logits[:1], [row(path=[-1], presence_penalty=1.0)])
    with pytest.raises(ValueError, match="prompt and output hold token 77"):
        sample_tokens(logits[:1], [row(tokens=[77, 1], repetition_penalty=2.0)])
