"""Teacher forcing and regret on the toy target, against the formulas spelled out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.engine.engine import Engine
from paceline.request.sampling_params import SamplingParams
from paceline.sampling.sampler import filter_rows
from paceline_lab.teacher_forcing import SLICE_ROWS, forced_logits
from paceline_lab.verify.verification import score_output
from tests.arrays import same
from tests.sampling.test_sampler import scalar_noise
from tests.toy import EOS, HYBRIDS, VOCAB, Job, assert_no_leak, run_jobs, toy_engine

PROMPT = [7, 3, 11, 7, 3]
RECIPES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 20},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.7, "presence_penalty": 0.5},
    {"temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {4: 3.0, 5: -3.0}},
    {"temperature": 1.0, "allowed_token_ids": (1, 2, 3, 9), "banned_token_ids": (2,)},
]


def all_logits(engine: Engine, tokens: list[int], first: int) -> torch.Tensor:
    pieces, expected = [], first
    for begin, logits in forced_logits(engine, tokens, first):
        assert begin == expected
        expected += len(logits)
        pieces.append(torch.from_numpy(logits.copy()))
    assert expected == len(tokens)
    return torch.cat(pieces)


def text(length: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("length", [2, 64, 65, 66, 130, 200])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_forced_logits_are_those_that_the_engine_serves(length: int, dtype: str) -> None:
    engine, tokens = toy_engine(dtype=dtype, max_model_len=201), text(length)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=VOCAB)
    served = run_jobs(engine, [Job(tokens, params)])[0][0].prompt_logprobs
    found = torch.log_softmax(all_logits(engine, tokens, 1), dim=-1)
    for row, entry in zip(found, served[1:], strict=True):
        # Log-softmax is two programs, of which one rounds once.
        assert dict(entry.top) == pytest.approx(dict(enumerate(row.tolist())), rel=1e-6)
    assert_no_leak(engine)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_forced_logits_of_a_hybrid_are_those_that_it_is_served_with(kind: str) -> None:
    """Texts that are longer than a draft, and are no multiple of a slice."""
    engine, tokens = toy_engine(shape=HYBRIDS[kind]), text(150)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=VOCAB)
    served = run_jobs(engine, [Job(tokens, params)])[0][0].prompt_logprobs
    found = torch.log_softmax(all_logits(engine, tokens, 1), dim=-1)
    for row, entry in zip(found, served[1:], strict=True):
        assert dict(entry.top) == pytest.approx(dict(enumerate(row.tolist())), rel=1e-6, abs=1e-6)
    assert_no_leak(engine)


@pytest.mark.parametrize("first", [1, 2, 63, 64, 65, 66, 128, 129])
def test_the_first_row_can_be_anywhere(first: int) -> None:
    engine, tokens = toy_engine(), text(130)
    assert same(all_logits(engine, tokens, first), all_logits(engine, tokens, 1)[first - 1 :])


def test_every_forward_has_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows = toy_engine(), []
    pack = engine.runner.pack

    def recorded(spans: Any) -> Any:
        rows.extend(len(span.token_ids) for span in spans)
        return pack(spans)

    monkeypatch.setattr(engine.runner, "pack", recorded)
    for length in (2, 70, 129):
        list(forced_logits(engine, text(length), 1))
    assert rows == [SLICE_ROWS] * 5


def test_a_cache_without_room_is_an_error_and_holds_nothing_after() -> None:
    engine = toy_engine(num_blocks=5)
    with pytest.raises(ConfigError, match="kv-cache-memory"):
        list(forced_logits(engine, text(100), 1))
    assert_no_leak(engine)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_engines_own_tokens_have_no_regret(recipe: dict[str, Any]) -> None:
    engine = toy_engine()
    params = SamplingParams(max_tokens=66, seed=3, **recipe)
    output = run_jobs(engine, [Job(PROMPT, params)])[0][0].token_ids
    found = score_output(engine, PROMPT, output, params)
    assert found.inner.tolist() == [0.0] * len(output)
    assert not len(found.boundary)


def edited_logits(engine: Engine, output: list[int], params: SamplingParams) -> np.ndarray:
    """Only for parameters without penalties, bias or masks."""
    return all_logits(engine, [*PROMPT, *output], len(PROMPT)).double().numpy()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_regret_is_its_formula(temperature: float) -> None:
    engine, output = toy_engine(), text(70)
    params = SamplingParams(temperature=temperature, seed=9)
    z = edited_logits(engine, output, params)
    if temperature:
        z = z / temperature
        for row in range(len(z)):
            z[row] += [scalar_noise(9, len(PROMPT) + row, 0, v) for v in range(VOCAB)]
    expected = z.max(axis=1) - z[np.arange(len(output)), output]
    found = score_output(engine, PROMPT, output, params)
    assert found.inner == pytest.approx(expected)
    assert expected.max() > 1  # these tokens were not chosen by the model
    assert not len(found.boundary)


@pytest.mark.parametrize("filters", [{"top_k": 6}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_tokens_outside_a_filter_are_counted_apart(filters: dict[str, Any]) -> None:
    engine, output = toy_engine(), text(70)
    params = SamplingParams(temperature=0.8, seed=9, **filters)
    z = edited_logits(engine, output, params) / 0.8
    keep = filter_rows(z, [params] * len(z))
    inner, boundary = [], []
    for row, token in enumerate(output):
        noise = [scalar_noise(9, len(PROMPT) + row, 0, v) for v in range(VOCAB)]
        scores = z[row] + noise
        if keep[row, token]:
            inner.append(scores[keep[row]].max() - scores[token])
        else:
            beyond = z[row, keep[row]].min() - z[row, token]
            boundary.append(max(beyond, scores.max() - scores[token]))
    found = score_output(engine, PROMPT, output, params)
    assert min(len(inner), len(boundary)) > 0
    assert found.inner == pytest.approx(inner)
    assert found.boundary == pytest.approx(boundary)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_infinitely_far_away(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1, banned_token_ids=(5, EOS))
    found = score_output(toy_engine(), PROMPT, [5, 5, 5], params)
    assert found.boundary.tolist() == [math.inf] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_never_pass(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = toy_engine()
    forward = engine.runner.forward

    def broken(batch: Any) -> Any:
        result = forward(batch)
        result.logits = np.full_like(result.logits, math.nan)
        return result

    monkeypatch.setattr(engine.runner, "forward", broken)
    params = SamplingParams(temperature=temperature, seed=1)
    found = score_output(engine, PROMPT, [0, 1, 2], params)
    assert found.boundary.tolist() == [math.inf] * 3
