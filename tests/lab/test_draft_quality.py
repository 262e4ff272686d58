"""A draft's figures against their definitions, and against noise that is really drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.api.llm import LLM, embedded_model
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError, TraceError
from paceline.engine.engine import Engine
from paceline.models.weights import PrunedHead
from paceline.request.traces import Trace
from paceline_lab.teacher_forcing import forced_logits
from paceline_lab.tune import draft_quality as module
from paceline_lab.tune.draft_quality import (
    DraftQuality,
    compare_models,
    coupled_acceptance,
    draft_quality,
    log_softmax,
    ranks,
)
from tests.lab.test_drafts import make_meta, make_trace, toy_traces
from tests.toy import VOCAB, draft_config, toy_engine, toy_runner

LOGITS = st.lists(st.floats(-30, 30), min_size=5, max_size=5)


# --- definitions ---------------------------------------------------------------------------------


def coupled_by_definition(p: list[float], q: list[float]) -> float:
    pairs = list(zip(p, q, strict=True))
    return sum(1 / sum(max(a / pi, b / qi) for a, b in pairs) for pi, qi in pairs)


@given(st.lists(st.tuples(LOGITS, LOGITS), min_size=1, max_size=3), st.floats(0.3, 2))
def test_coupled_acceptance_is_its_formula(
    rows: list[tuple[list[float], list[float]]], temperature: float
) -> None:
    log_p, log_q = (
        log_softmax(np.array([row[side] for row in rows], np.float32), temperature)
        for side in (0, 1)
    )
    expected = [
        coupled_by_definition(*each)
        for each in zip(np.exp(log_p).tolist(), np.exp(log_q).tolist(), strict=True)
    ]
    found = coupled_acceptance(log_p, log_q)
    assert found == pytest.approx(expected)
    variation = np.abs(np.exp(log_p) - np.exp(log_q)).sum(axis=1) / 2
    assert (found <= 1 - variation + 1e-9).all()
    assert (found >= (1 - variation) / (1 + variation) - 1e-9).all()


def test_coupled_acceptance_is_how_often_shared_noise_agrees() -> None:
    rng = np.random.default_rng(0)
    log_p, log_q = (log_softmax(rng.normal(size=(1, 9)).astype(np.float32), 0.7) for _ in "pq")
    noise = rng.gumbel(size=(200_000, 9))
    agreed = (log_p + noise).argmax(axis=1) == (log_q + noise).argmax(axis=1)
    assert coupled_acceptance(log_p, log_q)[0] == pytest.approx(agreed.mean(), abs=0.005)


def test_tokens_that_cannot_come_count_for_nothing() -> None:
    inf = -math.inf
    log_p = np.log(np.array([[0.5, 0.5, 1e-300, 1e-300]]))
    log_q = np.log(np.array([[0.5, 1e-300, 0.5, 1e-300]]))
    log_p[0, 3] = log_q[0, 3] = inf
    log_p[0, 2] = inf
    # The first token wins both where it beats one other token in each: a third of the noise.
    assert coupled_acceptance(log_p, log_q) == pytest.approx([1 / 3])


def test_ranks_are_places_in_a_stable_order() -> None:
    logits = np.random.default_rng(2).integers(0, 4, (20, 7)).astype(np.float32)
    tokens = np.arange(20) % 7
    order = np.argsort(-logits, axis=1, kind="stable").tolist()
    expected = [row.index(token) for row, token in zip(order, tokens.tolist(), strict=True)]
    assert ranks(logits, tokens).tolist() == expected


# --- toy models ----------------------------------------------------------------------------------

CONFIG = draft_config()


def measured(traces: list[Trace], noise: float = 0.4, max_tokens: int = 1000) -> DraftQuality:
    runner = toy_runner(prefix_caching=False, noise=noise)
    return compare_models(toy_engine(), runner, traces, max_tokens)


def all_logits(engine: Engine, traces: list[Trace]) -> np.ndarray:
    pieces = []
    for trace in traces:
        if len(trace.output_token_ids):
            tokens = trace.token_ids.tolist()
            pieces += [z.copy() for _, z in forced_logits(engine, tokens, trace.prompt_len)]
    return np.concatenate(pieces).astype(np.float64)


@pytest.mark.parametrize("noise", [0.4, 3.0])
def test_figures_are_their_definitions(noise: float) -> None:
    traces = toy_traces(0.8)
    found = measured(traces, noise)
    draft = Engine(toy_runner(prefix_caching=False, noise=noise), toy_engine().config)
    z = [all_logits(engine, traces) for engine in (toy_engine(), draft)]
    p, q = (np.exp(each) / np.exp(each).sum(axis=1, keepdims=True) for each in z)
    count = sum(len(trace.output_token_ids) for trace in traces)
    assert found.num_tokens == len(p) == count
    assert found.kl == pytest.approx((p * np.log(p / q)).sum() / count)
    best = p.argmax(axis=1)
    order = np.argsort(-z[1], axis=1, kind="stable")
    for k in (1, 2, 4, 8):
        agreed = [b in row[:k] for b, row in zip(best.tolist(), order.tolist(), strict=True)]
        assert found.agreement[k] == pytest.approx(np.mean(agreed))
    p, q = (np.exp(each / 0.8) / np.exp(each / 0.8).sum(axis=1, keepdims=True) for each in z)
    pairs = zip(p.tolist(), q.tolist(), strict=True)
    coupled = np.mean([coupled_by_definition(*pair) for pair in pairs])
    assert found.coupled_acceptance == pytest.approx(coupled)


def test_a_draft_that_is_the_target_agrees_with_it() -> None:
    found = measured(toy_traces(0.8), noise=0.0)
    assert found.kl == 0.0
    assert set(found.agreement.values()) == {1.0}
    assert found.coupled_acceptance == pytest.approx(1)


def test_a_pruned_head_is_compared_over_its_own_tokens() -> None:
    traces = toy_traces(0.8)
    runner = toy_runner(prefix_caching=False, noise=0.4)
    decoder = runner.decoder
    ids = np.arange(0, VOCAB, 3)
    whole = all_logits(Engine(runner, toy_engine().config), traces)
    decoder.pruned_head = PrunedHead(ids, VOCAB)
    forward = runner._forward.logits
    runner._forward.logits = lambda *given: forward(*given)[:, ids]  # type: ignore[method-assign]
    found = compare_models(toy_engine(), runner, traces, 1000)
    z = (all_logits(toy_engine(), traces)[:, ids], whole[:, ids])
    p, q = (np.exp(each) / np.exp(each).sum(axis=1, keepdims=True) for each in z)
    assert found.kl == pytest.approx((p * np.log(p / q)).sum() / len(p))


def test_slices_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = toy_traces(0.8)
    whole = measured(traces)
    monkeypatch.setattr(module, "ELEMENTS", 3 * VOCAB)
    sliced = measured(traces)
    assert sliced.kl == pytest.approx(whole.kl)
    assert sliced.coupled_acceptance == pytest.approx(whole.coupled_acceptance)
    assert (sliced.num_tokens, sliced.agreement) == (whole.num_tokens, whole.agreement)


def test_no_more_tokens_than_wanted_or_than_fit() -> None:
    traces = toy_traces(0.0)
    first = len(traces[0].output_token_ids)
    assert measured(traces, max_tokens=first + 3).num_tokens == first + 3
    long = make_trace(0, [3] * 250, list(range(1, 21)))
    assert measured([long]).num_tokens == 6
    with pytest.raises(TraceError, match="no output token"):
        measured([make_trace(0, [3] * 256, [1])])


def test_the_embedded_pair() -> None:
    config = SpeculativeConfig("draft_model", embedded_model("draft"))
    meta = make_meta(0.0) | {"vocab_fingerprint": None}
    with LLM("embedded", speculative_config=[]) as llm:
        texts = ["def add(a, b):\n    return a", "Once upon a time there was"]
        prompts = [llm.encode(text) for text in texts]
        traces = [make_trace(i, ids[:2], ids[2:]) for i, ids in enumerate(prompts)]
        found = llm.call(lambda engine: draft_quality(engine, config, traces, meta, 2048))
        assert found.num_tokens == sum(len(ids) - 2 for ids in prompts)
        assert 0 < found.kl < 5
        assert 0 < found.coupled_acceptance < 1
        meta["vocab_fingerprint"] = "x"
        with pytest.raises(ConfigError, match="other ones"):
            llm.call(lambda engine: draft_quality(engine, config, traces, meta, 2048))
        large = [make_trace(0, [1], [5000])]
        with pytest.raises(TraceError, match="token 5000"):
            llm.call(lambda engine: draft_quality(engine, config, large, meta, 2048))
