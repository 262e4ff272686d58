"""Training of DFlash heads: what is trained is what drafts."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.backends.resolve import resolve_ops
from paceline.build.build import open_runner, resolve_config
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.errors import ConfigError, TrainingError
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.decoder import Decoder
from paceline.proposers.base import TargetInfo
from paceline.proposers.heads import _fusion, build
from paceline.proposers.heads.blocks import DFlashProposer
from paceline.proposers.heads.checkpoint import load_head
from paceline.request.span import Span
from paceline.request.traces import Trace, read_traces
from paceline_lab.train.heads.features import (
    FeatureRows,
    HeadBatch,
    join_rows,
    num_rows,
    num_wanted,
)
from paceline_lab.train.heads.initial import TargetWeights, dflash_params
from paceline_lab.train.heads.kinds import dflash_layers
from paceline_lab.train.heads.losses import AcceptanceCount, head_loss
from paceline_lab.train.heads.modules import DFlash
from paceline_lab.train.heads.train import train_head
from paceline_lab.train.lm import LMTrainingResult
from paceline_lab.train.ops import TrainingOps
from tests.lab.train.test_heads import head_config, traces  # noqa: F401

SIZE = 5


@pytest.fixture(scope="module")
def written(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A head of two layers after a step of training."""
    folder = tmp_path_factory.mktemp("heads") / "dflash"
    options = {"num_layers": 2, "block_size": SIZE, "steps": 1}
    train_head(head_config(trained.folder, traces, folder, kind="dflash", **options))
    return folder


def _batch(texts: list[Trace], width: int, vocab_size: int) -> HeadBatch:
    """Texts with random features and distributions."""
    made = list[FeatureRows]()
    for text in texts:
        generator = torch.Generator().manual_seed(len(made))
        logits = torch.randn(num_wanted(text), vocab_size, generator=generator)
        probs, ids = logits.softmax(-1).topk(5)
        made.append(
            FeatureRows(torch.randn(num_rows(text), width, generator=generator), ids, probs)
        )
    return HeadBatch.of(texts, join_rows(made))


def _trained_head(folder: Path, target: Path) -> tuple[DFlash, dict[str, torch.Tensor]]:
    told = json.loads((folder / "config.json").read_text())
    checkpoint, params = load_checkpoint(target), load_file(folder / "model.safetensors")
    layers = dflash_layers(checkpoint.config, 2)
    embedding = TargetWeights(checkpoint).embedding
    mask = told["mask_token_id"]
    return DFlash(layers, params, embedding, TrainingOps(), 64, SIZE, mask), params


def _drafting_logits(
    folder: Path, target: Path, text: Trace, features: torch.Tensor, anchors: list[int]
) -> torch.Tensor:
    """Of the masks of the blocks that begin at positions of a text, as they are drafted:
    ``[blocks, masks, columns]``."""
    head, checkpoint = load_head(str(folder)), load_checkpoint(target)
    assert head.block is not None
    settings = EngineConfig(dtype="float32", backend="reference", max_model_len=64)
    lent = open_runner(checkpoint, *resolve_config(settings, checkpoint))[0].decoder.ends
    ops = resolve_ops("float32", "cpu", True, "reference")
    decoder = Decoder(head.decoder.config, head.decoder.tensors, ops, 64, lent=lent)
    kv = KVCache(ops.kv_memory(decoder.config, 40, "float32"), prefix_caching=False)
    runner, found = ModelRunner(decoder, kv), list[torch.Tensor]()
    width = checkpoint.config.hidden_size
    taps = features.shape[1] // width
    read = features.view(len(features), taps, width).float().numpy()
    known = _fusion(head, ops, taps, width)(read)
    for anchor in anchors:
        kv.open(anchor)
        assert kv.reserve(anchor, anchor)
        tokens = text.token_ids[:anchor].tolist()
        context = Span.chunk(anchor, 0, tokens, sample=False)
        runner.write_kv(runner.pack([context]), known[:anchor])
        kv.commit(anchor, range(anchor))
        assert kv.reserve(anchor, SIZE)
        block = [int(text.token_ids[anchor]), *[head.block.mask_token] * (SIZE - 1)]
        span = Span(anchor, anchor, block, range(-1, SIZE - 1), range(1, SIZE))
        found.append(torch.from_numpy(runner.forward(runner.pack([span])).logits))
        kv.free(anchor)
    return torch.stack(found)


def test_training_computes_what_drafts(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    written: Path,
) -> None:
    texts = list(read_traces(traces))[:3]
    head, params = _trained_head(written, trained.folder)
    batch = _batch(texts, params["fc.weight"].shape[1], 280)
    steps = list(head.steps(batch, SIZE, torch.arange(len(batch.wanted))))
    assert len(steps) == SIZE - 1
    compared = first = start = 0
    for text in texts:
        anchors = list(range(text.prompt_len, len(text.token_ids) - 1))
        features = batch.features[start : start + num_rows(text)]
        logits = _drafting_logits(written, trained.folder, text, features, anchors)
        for depth, (rows, x) in enumerate(steps):
            for index in range(len(anchors) - depth):
                place = (rows == first + index + depth).nonzero().item()
                found = x[place] @ params["lm_head.weight"].T
                torch.testing.assert_close(found, logits[index, depth], rtol=0, atol=1e-4)
                compared += 1
        start, first = start + num_rows(text), first + len(anchors)
    assert compared == sum(len(rows) for rows, _ in steps)


def test_blocks_do_not_depend_on_each_other(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    written: Path,
) -> None:
    head, params = _trained_head(written, trained.folder)
    texts = list(read_traces(traces))[:2]
    batch = _batch(texts, params["fc.weight"].shape[1], 280)
    every = list(head.steps(batch, SIZE, torch.arange(len(batch.wanted))))
    some = head.steps(batch, SIZE, torch.tensor([0, 3, len(batch.wanted) - 2]))
    for (rows, x), (kept, found) in zip(every, some, strict=True):
        places = [(rows == row).nonzero().item() for row in kept.tolist()]
        torch.testing.assert_close(found, x[places], rtol=1e-4, atol=1e-5)


def test_a_head_begins_with_what_is_near(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
) -> None:
    checkpoint = load_checkpoint(trained.folder)
    weights, layers = TargetWeights(checkpoint), dflash_layers(checkpoint.config, 1)
    text = max(read_traces(traces), key=num_rows)
    batch = _batch([text], layers.hidden_size, 280)
    common = torch.randn(layers.hidden_size, generator=torch.Generator().manual_seed(5))
    features = batch.features + 2.0 * common
    params = dflash_params(weights, layers, torch.arange(280), features, 279, seed=0)
    head = DFlash(layers, params, weights.embedding, TrainingOps(), 64, SIZE, 279)
    last = torch.tensor([len(batch.wanted) - 1])  # one block, after all of the text

    def drafted(changed: slice) -> torch.Tensor:
        other = features.clone()
        other[changed] = other[changed].roll(1, dims=1)
        return next(iter(head.steps(dataclasses.replace(batch, features=other), 1, last)))[1]

    nothing, end = drafted(slice(0, 0)), len(features)
    far, near = drafted(slice(0, 4)) - nothing, drafted(slice(end - 4, end)) - nothing
    assert near.norm() > 3.0 * far.norm()


def test_gradients_reach_every_tensor(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    written: Path,
) -> None:
    _, params = _trained_head(written, trained.folder)
    learnt = {name: p for name, p in params.items() if p.is_floating_point()}
    for p in learnt.values():
        p.requires_grad_()
    checkpoint = load_checkpoint(trained.folder)
    layers = dflash_layers(checkpoint.config, 2)
    embedding = TargetWeights(checkpoint).embedding
    head = DFlash(layers, params, embedding, TrainingOps(), 64, SIZE, 279)
    batch = _batch(list(read_traces(traces))[:2], params["fc.weight"].shape[1], 280)
    column_of = torch.full((280,), -1)
    column_of[params["t2d"].nonzero().squeeze(1)] = torch.arange(100)
    every, matrix = torch.arange(len(batch.wanted)), params["lm_head.weight"]
    loss = head_loss(head, matrix, batch, column_of, SIZE - 1, 0.8, every)
    loss.backward()
    for name, p in learnt.items():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name
    counted = AcceptanceCount(SIZE - 1)
    counted.add(head, matrix, batch, column_of)
    assert counted.loss(0.8) == pytest.approx(loss.item(), rel=1e-5)


def test_training_raises_acceptance(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"block_size": SIZE, "eval_steps": 9}
    result = train_head(head_config(trained.folder, traces, tmp_path, kind="dflash", **options))
    assert result.before is not None
    assert result.after is not None
    assert len(result.after.greedy) == SIZE - 1
    assert result.after.greedy[0] > result.before.greedy[0] + 0.1
    assert result.after.overlap[0] > result.before.overlap[0] + 0.1
    assert f"blocks of {SIZE}" in (tmp_path / "README.md").read_text()


def test_a_written_head_drafts(trained: LMTrainingResult, written: Path) -> None:
    checkpoint = load_checkpoint(trained.folder)
    settings = EngineConfig(dtype="float32", backend="reference", max_model_len=64)
    runner = open_runner(checkpoint, *resolve_config(settings, checkpoint))[0]
    vocabulary = checkpoint.config.vocab_size
    info = TargetInfo(vocabulary, None, "cpu", 64, 4, 1 << 22, "reference", runner)
    config = SpeculativeConfig("dflash", model=str(written), dtype="float32")
    assert isinstance(build(config, info), DFlashProposer)


def test_training_goes_on_with_the_same_mask_token(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    tmp_path: Path,
    written: Path,
) -> None:
    """Other traces have another token least often; and configurations have more than one style."""
    earlier = tmp_path / "earlier"
    shutil.copytree(written, earlier)
    told = json.loads((earlier / "config.json").read_text())
    told["mask_token_id"] = known = told["mask_token_id"] - 1
    layers = told["transformer_layer_config"]
    layers["rope_parameters"] = {"rope_theta": layers.pop("rope_theta"), "rope_type": "default"}
    (earlier / "config.json").write_text(json.dumps(told))
    options = {"num_layers": 2, "block_size": SIZE, "steps": 1, "init": str(earlier)}
    train_head(head_config(trained.folder, traces, tmp_path / "later", kind="dflash", **options))
    found = json.loads((tmp_path / "later" / "config.json").read_text())
    assert found["mask_token_id"] == known


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_layers": 3}, TrainingError),
        ({"block_size": 1}, ConfigError),
        ({"kind": "eagle3", "num_layers": 2}, ConfigError),
    ],
)
def test_impossible_options_are_refused(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    tmp_path: Path,
    options: dict[str, Any],
    error: type[Exception],
) -> None:
    with pytest.raises(error, match=next(reversed(options))):
        train_head(head_config(trained.folder, traces, tmp_path, **{"kind": "dflash", **options}))
