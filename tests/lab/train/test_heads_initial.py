"""A head begins as its target's last layer: with its input, it computes what that layer does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.build.build import open_runner, resolve_config
from paceline.config import EngineConfig
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.request.span import Span
from paceline_lab.train.heads.features import Grid
from paceline_lab.train.heads.initial import (
    HEAD,
    TargetWeights,
    default_taps,
    eagle3_params,
    mtp_params,
    rarest_token,
)
from paceline_lab.train.heads.kinds import layers_config
from paceline_lab.train.heads.modules import ATTENTION, MTP_LAYER, Eagle3, Mtp
from paceline_lab.train.lm import LMTrainingResult
from paceline_lab.train.ops import TrainingOps
from paceline_lab.train.surgery import frequent_tokens
from tests.lab.train.test_heads import one_text, random_traces

COUNT = 10


def _check_begins_as_last_layer(target: Checkpoint) -> None:
    config, layers = target.config, target.config.num_layers
    settings = EngineConfig(dtype="float32", backend="reference", max_model_len=64)
    runner = open_runner(target, *resolve_config(settings, target))[0]
    tokens = torch.randint(3, config.vocab_size, (COUNT,), generator=torch.Generator()).tolist()
    runner.taps = (layers - 1, layers)
    runner.kv.open(0)
    runner.kv.reserve(0, COUNT)
    span = Span(0, 0, tokens, range(-1, COUNT - 1), range(COUNT))
    result = runner.forward(runner.pack([span]))
    assert result.features is not None
    given, wanted = torch.from_numpy(result.features).unbind(1)

    weights, ids = TargetWeights(target), torch.arange(0, config.vocab_size, 3)
    params = eagle3_params(weights, 2, ids, seed=0)
    for name in "qkv":
        params[f"{ATTENTION}{name}_proj.weight"][:, : config.hidden_size] = 0.0
    head = Eagle3(layers_config(config), params, weights.embedding, TrainingOps(), 64)
    rows = torch.arange(COUNT)
    grid = Grid(1, COUNT, rows)
    x = head.fused(torch.cat((torch.randn_like(given), given), dim=1))
    found, _ = head.first(torch.tensor(tokens), x, rows, grid, rows, grid)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    read = TrainingOps().rms_norm(found, params["norm.weight"], config.norms.eps)
    logits = read @ params[HEAD].T
    torch.testing.assert_close(
        logits, torch.from_numpy(result.logits)[:, ids], rtol=1e-4, atol=1e-4
    )


def _check_mtp_begins_alike(target: Checkpoint) -> None:
    """As an EAGLE-3 head of the same target: beyond the linear, both compute the same."""
    config, weights = target.config, TargetWeights(target)
    width, ids = config.hidden_size, torch.arange(config.vocab_size)
    eagle3, mtp = eagle3_params(weights, 1, ids, seed=0), mtp_params(weights, seed=0)
    for name in "qkv":
        eagle3[f"{ATTENTION}{name}_proj.weight"][:, :width] = 0.0
    mtp[MTP_LAYER + "input_proj.weight"] = torch.eye(width, 2 * width).roll(width, dims=1)
    x = torch.randn(COUNT, width, generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.rms_norm(x, (width,), eps=config.norms.eps)
    rows, layers = torch.arange(COUNT), layers_config(config)
    logits = []
    for kind, params, matrix in ((Eagle3, eagle3, eagle3[HEAD]), (Mtp, mtp, weights.head)):
        head = kind(layers, params, weights.embedding, TrainingOps(), 64)
        _, read = next(iter(head.steps(one_text(rows, x), 1, rows)))
        logits.append(read @ matrix.T)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_head_begins_as_the_last_layer(trained: LMTrainingResult) -> None:
    _check_begins_as_last_layer(load_checkpoint(trained.folder))
    _check_mtp_begins_alike(load_checkpoint(trained.folder))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "granite"])
def test_a_head_begins_as_the_last_layer_of_a_family(tmp_path: Path, family: str) -> None:
    from tests.models import reference  # brings transformers

    reference.save_model(family, tmp_path)
    _check_begins_as_last_layer(load_checkpoint(tmp_path))
    _check_mtp_begins_alike(load_checkpoint(tmp_path))


def test_taps_are_a_low_a_middle_and_a_high_layer() -> None:
    assert default_taps("eagle3", 30) == (2, 15, 27)
    assert all(
        0 <= tap <= layers for layers in range(1, 12) for tap in default_taps("dflash", layers)
    )


def test_frequent_tokens() -> None:
    answers = np.concatenate([trace.output_token_ids for trace in random_traces()]).tolist()
    ids = frequent_tokens(np.array(answers), 50, 8, [49])
    assert 49 in ids
    assert ids.tolist() == sorted(set(ids.tolist()))
    least = min(answers.count(i) for i in ids.tolist() if i != 49)
    assert all(answers.count(i) <= least for i in set(answers) - set(ids.tolist()))


def test_rarest_token_is_one_that_no_text_has_and_attention_can_read() -> None:
    traces = random_traces()
    seen = {token for trace in traces for token in trace.token_ids.tolist()}
    embedding = torch.ones(50, 4)
    chosen = rarest_token(traces, embedding)
    assert chosen == max(set(range(50)) - seen)
    embedding[chosen] = 0.0
    assert rarest_token(traces, embedding) == max(set(range(chosen)) - seen)
    every = dataclasses.replace(traces[0], token_ids=np.arange(50, dtype=np.int32))
    assert rarest_token([*traces, every], torch.ones(50, 4)) == chosen
