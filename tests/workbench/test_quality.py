"""Perplexity and divergence against their definitions, and windows that cover a text once."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sampling_params import SamplingParams
from paceline.workbench.quality import engine_logits, measure, record, windows
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


def test_figures_are_their_definitions(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    own, theirs = (rng.normal(size=(50, VOCAB)).astype(np.float32) * 3 for _ in range(2))
    targets = rng.integers(0, VOCAB, 50).tolist()
    p, q = (np.exp(z.astype(float)) for z in (theirs, own))
    p, q = (z / z.sum(axis=1, keepdims=True) for z in (p, q))
    pairs = zip(p, q, strict=True)
    kl = [sum(a * math.log(a / b) for a, b in zip(*pair, strict=True)) for pair in pairs]
    perplexity = math.exp(-sum(math.log(q[i, t]) for i, t in enumerate(targets)) / 50)
    base = math.exp(-sum(math.log(p[i, t]) for i, t in enumerate(targets)) / 50)
    stored = record([theirs[:7], theirs[7:]], 50, VOCAB, tmp_path / "logits")
    found = measure(targets, [own[:20], own[20:]], stored)
    assert found.num_tokens == 50
    assert found.perplexity == pytest.approx(perplexity)
    assert found.ratio == pytest.approx(perplexity / base)
    assert found.mean_kl == pytest.approx(np.mean(kl))
    assert found.max_kl == pytest.approx(max(kl))
    assert found.top1_agreement == np.mean(p.argmax(1) == q.argmax(1))


def test_what_is_measured_is_what_is_served(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    pieces = windows(TEXT, len(TEXT), 1)
    engine = toy_engine()
    reference = record(engine_logits(engine, pieces), len(TEXT) - 1, VOCAB, tmp_path / "logits")
    exact = measure(TEXT[1:], [reference], reference)
    assert (exact.ratio, exact.mean_kl, exact.top1_agreement) == (1.0, 0.0, 1.0)
    for dtype in ("float32", "int8"):
        engine = toy_engine(dtype=dtype)
        served = run_jobs(engine, [Job(TEXT, params)])[0][0].prompt_logprobs[1:]
        found = measure(TEXT[1:], engine_logits(engine, pieces), reference)
        mean = sum(entry.logprob for entry in served) / len(served)
        assert found.perplexity == pytest.approx(math.exp(-mean), rel=1e-5)
        assert (found.mean_kl > 1e-6) == (dtype == "int8")
