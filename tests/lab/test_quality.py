"""Perplexity and divergence against their definitions, and windows that cover a text once."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.request.sampling_params import SamplingParams
from paceline_lab.quality.quality import (
    REFERENCE,
    Quality,
    WindowScore,
    engine_arm,
    excess,
    measure,
    score,
    windows,
)
from tests.toy import VOCAB, Job, run_jobs, toy_engine

TEXT = np.random.default_rng(3).integers(1, VOCAB, 150).tolist()


@given(st.integers(0, 60), st.integers(2, 20), st.data())
def test_windows_score_every_token_once(count: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length - 1))
    text = list(range(count))
    found = windows(text, length, stride)
    assert [token for piece in found for token in piece.targets] == text[1:]
    for number, piece in enumerate(found):
        assert 1 <= piece.first < len(piece.token_ids) <= length
        assert list(piece.token_ids) == text[piece.token_ids[0] :][: len(piece.token_ids)]
        if number:
            assert len(piece.targets) <= stride
            assert len(piece.token_ids) == length


@given(st.integers(0, 60), st.integers(3, 20), st.data())
def test_every_window_begins_with_the_bos_token(
    count: int, length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length - 1))
    text = list(range(count))
    found = windows(text, length, stride, bos_token_id=999)
    assert [token for piece in found for token in piece.targets] == text
    for piece in found:
        bos, *rest = piece.token_ids
        assert bos == 999
        assert rest == text[rest[0] :][: len(rest)]
        assert 1 <= piece.first < len(piece.token_ids) <= length


def test_figures_are_their_definitions() -> None:
    rng = np.random.default_rng(0)
    own, theirs = (rng.normal(size=(50, VOCAB)).astype(np.float32) * 3 for _ in range(2))
    targets = rng.integers(0, VOCAB, 50).tolist()
    p, q = (np.exp(z.astype(float)) for z in (theirs, own))
    p, q = (z / z.sum(axis=1, keepdims=True) for z in (p, q))
    pairs = zip(p, q, strict=True)
    kl = [sum(a * math.log(a / b) for a, b in zip(*pair, strict=True)) for pair in pairs]
    perplexity = math.exp(-sum(math.log(q[i, t]) for i, t in enumerate(targets)) / 50)
    base = math.exp(-sum(math.log(p[i, t]) for i, t in enumerate(targets)) / 50)
    parts = [
        score(targets[part], own[part], theirs[part]) for part in (slice(0, 20), slice(20, 50))
    ]
    found = Quality(parts)
    assert found.num_tokens == 50
    assert found.perplexity == pytest.approx(perplexity)
    assert found.ratio == pytest.approx(perplexity / base)
    assert found.mean_kl == pytest.approx(np.mean(kl))
    assert found.kl_99 == pytest.approx(np.quantile(kl, 0.99))
    assert found.top1_agreement == np.mean(p.argmax(1) == q.argmax(1))


def test_what_is_measured_is_what_is_served() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    pieces = windows(TEXT, len(TEXT), 1)
    dtypes = ("float32", "int8")
    engines = {dtype: toy_engine(dtype=dtype) for dtype in dtypes}
    arms = {f"own {name}": partial(engine_arm, each) for name, each in engines.items()}
    rows = measure(pieces, VOCAB, partial(engine_arm, toy_engine(dtype="float32")), arms)
    exact = rows[REFERENCE]
    assert (exact.ratio, exact.mean_kl, exact.top1_agreement) == (1.0, 0.0, 1.0)
    for dtype in dtypes:
        served = run_jobs(toy_engine(dtype=dtype), [Job(TEXT, params)])[0][0].prompt_logprobs[1:]
        found = rows[f"own {dtype}"]
        mean = sum(entry.logprob for entry in served) / len(served)
        assert found.perplexity == pytest.approx(math.exp(-mean), rel=1e-5)
        assert (found.mean_kl > 1e-6) == (dtype == "int8")


def test_windows_are_read_one_by_one_and_compared_with_their_own_reference() -> None:
    pieces = windows(TEXT[:61], 16, 15)
    rng = np.random.default_rng(1)
    table = rng.normal(size=(len(TEXT), VOCAB)).astype(np.float32)
    read: list[str] = []

    def arm(name: str, scale: float, piece: object, out: np.ndarray) -> None:
        read.append(name)
        out[:] = table[: len(out)] * scale

    rows = measure(
        pieces,
        VOCAB,
        partial(arm, "base", 1.0),
        {"a": partial(arm, "a", 1.0), "b": partial(arm, "b", 2.0)},
    )
    assert read == ["base", "a", "b"] * len(pieces)
    assert rows["a"].mean_kl == 0.0
    assert [len(each.kl) for each in rows["b"].windows] == [len(p.targets) for p in pieces]
    assert rows["b"].to_json()["windows"][0]["kl"] == pytest.approx(rows["b"].windows[0].kl.sum())


def row(means: list[float]) -> Quality:
    return Quality([WindowScore(0.0, 0.0, 0, np.full(10, mean)) for mean in means])


def test_a_paired_difference_takes_out_what_both_have() -> None:
    hard = np.random.default_rng(2).uniform(0, 100, 40).tolist()
    same = excess(row([x + 1 for x in hard]), row(hard))
    assert (same.difference, same.upper) == pytest.approx((1.0, 1.0))
    assert same.relative == pytest.approx(1 / np.mean(hard))
    noise = np.random.default_rng(3).normal(size=40)
    found = excess(row([x + n for x, n in zip(hard, noise, strict=True)]), row(hard))
    # By the normal approximation the bound is 1.645 standard errors above.
    bound = noise.mean() + 1.645 * noise.std() / math.sqrt(40)
    assert found.difference == pytest.approx(noise.mean())
    assert found.upper == pytest.approx(bound, abs=0.05)
    assert found == excess(row([x + n for x, n in zip(hard, noise, strict=True)]), row(hard))


def test_nothing_is_relative_to_no_divergence() -> None:
    assert excess(row([1.0, 2.0]), row([0.0, 0.0])).relative is None
