"""Training of MTP heads: what is trained is what drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.api.llm import LLM
from paceline.build.build import open_runner, resolve_config
from paceline.config import EngineConfig, parse_speculative_config
from paceline.core.errors import ConfigError
from paceline.loading.checkpoint import load_checkpoint
from paceline.proposers.base import TargetInfo
from paceline.proposers.heads import build
from paceline.proposers.heads.proposer import HeadProposer
from paceline.request.sampling_params import SamplingParams
from paceline.request.traces import Trace, read_traces
from paceline_lab.train.heads.features import (
    FeatureRows,
    HeadBatch,
    join_rows,
    num_rows,
    num_wanted,
)
from paceline_lab.train.heads.initial import TargetWeights
from paceline_lab.train.heads.kinds import layers_config
from paceline_lab.train.heads.losses import head_loss
from paceline_lab.train.heads.modules import MTP_LAYER, Mtp
from paceline_lab.train.heads.train import train_head
from paceline_lab.train.lm import LMTrainingResult
from paceline_lab.train.ops import TrainingOps
from tests.lab.train.test_heads import head_config, traces  # noqa: F401
from tests.lab.train.toy_text import SHAPE
from tests.proposers.mtp import forward, mtp_options

STEPS = 3


@pytest.fixture(scope="module")
def written(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A head after a step of training."""
    folder = tmp_path_factory.mktemp("heads") / "mtp"
    train_head(head_config(trained.folder, traces, folder, kind="mtp", steps=1))
    return folder


def _texts(folder: Path) -> tuple[list[Trace], list[torch.Tensor]]:
    """Texts, and random features of each."""
    texts, generator = list(read_traces(folder))[:3], torch.Generator().manual_seed(0)
    return texts, [
        torch.randn(num_rows(text), SHAPE.hidden_size, generator=generator) for text in texts
    ]


def _batch(texts: list[Trace], features: list[torch.Tensor]) -> HeadBatch:
    made = list[FeatureRows]()
    for text, rows in zip(texts, features, strict=True):
        probs, ids = torch.randn(num_wanted(text), 280).softmax(-1).topk(5)
        made.append(FeatureRows(rows, ids, probs))
    return HeadBatch.of(texts, join_rows(made))


def _head(folder: Path, target: Path) -> tuple[Mtp, dict[str, torch.Tensor], torch.Tensor]:
    """A head, its tensors, and the target's output matrix."""
    weights, params = (
        TargetWeights(load_checkpoint(target)),
        load_file(folder / "model.safetensors"),
    )
    head = Mtp(layers_config(weights.config), params, weights.embedding, TrainingOps(), 64)
    return head, params, weights.head


def _proposer(folder: Path, target: Path) -> HeadProposer:
    checkpoint = load_checkpoint(target)
    settings = EngineConfig(dtype="float32", backend="reference", max_model_len=64)
    runner = open_runner(checkpoint, *resolve_config(settings, checkpoint))[0]
    vocabulary = checkpoint.config.vocab_size
    info = TargetInfo(vocabulary, None, "cpu", 64, 4, 1 << 22, "reference", runner)
    proposer = build(mtp_options(model=str(folder)), info)
    assert isinstance(proposer, HeadProposer)
    return proposer


def test_training_computes_what_drafts(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    written: Path,
) -> None:
    """A drafted node reads what the head put out at its parent, and sees features before it."""
    texts, features = _texts(traces)
    head, _, matrix = _head(written, trained.folder)
    every = torch.arange(sum(map(num_wanted, texts)))
    steps = list(head.steps(_batch(texts, features), STEPS, every))
    proposer, compared, first, request = _proposer(written, trained.folder), 0, 0, 0
    for text, known in zip(texts, features, strict=True):
        for last in range(text.prompt_len - 1, num_rows(text)):
            inputs, begin = known[: last + 1], first + last + 1 - text.prompt_len
            for step in range(min(STEPS, num_rows(text) - last)):
                tokens = text.token_ids[1 : last + 2 + step].tolist()
                logits, outputs = forward(proposer, request, tokens, inputs)
                rows, x = steps[step]
                found = x[(rows == begin + step).nonzero().item()] @ matrix.T
                torch.testing.assert_close(found, logits[-1], rtol=0, atol=1e-4)
                inputs, compared = torch.cat((inputs, outputs[-1:])), compared + 1
                proposer._runner.kv.free(request)
        first += num_wanted(text)
    assert compared == sum(len(rows) for rows, _ in steps)


def test_gradients_reach_every_tensor(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    written: Path,
) -> None:
    head, params, matrix = _head(written, trained.folder)
    for p in params.values():
        p.requires_grad_()
    batch = _batch(*_texts(traces))
    every = torch.arange(len(batch.wanted))
    head_loss(head, matrix, batch, torch.arange(len(matrix)), STEPS, 0.8, every).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in params.values())


def test_training_raises_acceptance(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    result = train_head(head_config(trained.folder, traces, tmp_path, kind="mtp"))
    assert result.before is not None
    assert result.after is not None
    assert result.after.greedy[0] > result.before.greedy[0] + 0.1
    assert result.after.overlap[0] > result.before.overlap[0] + 0.1
    assert "| output | the target's |" in (tmp_path / "README.md").read_text()


def test_what_is_written(trained: LMTrainingResult, written: Path) -> None:
    told = json.loads((written / "config.json").read_text())
    assert told["speculators_model_type"] == "mtp"
    assert "draft_vocab_size" not in told
    layers = load_checkpoint(trained.folder).config.num_layers
    assert told["transformer_layer_config"]["num_hidden_layers"] == layers
    assert all(name.startswith(MTP_LAYER) for name in load_file(written / "model.safetensors"))


@pytest.mark.parametrize("weights_dtype", ["float32", "int8", "int4"])
def test_an_engine_drafts_and_says_what_it_says_without(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    tmp_path: Path,
    weights_dtype: str,
) -> None:
    options = {"kind": "mtp", "steps": 20, "weights_dtype": weights_dtype}
    train_head(head_config(trained.folder, traces, tmp_path / "head", **options))
    config = {"method": "mtp", "model": str(tmp_path / "head"), "min_accept_prob": 0.0}
    params, prompts = SamplingParams(temperature=0.0, max_tokens=24), ["the", "a"]
    said = []
    for drafts in (parse_speculative_config(config), ()):
        with LLM(str(trained.folder), speculative_config=drafts, planner="fixed") as llm:
            outputs = llm.generate(prompts, params)
            said.append([output.token_ids for output in outputs])
            origins = {origin for output in outputs for origin in output.completions[0].origins}
            assert ("mtp" in origins) == bool(drafts)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "options",
    [{"taps": (1,)}, {"draft_vocab_size": 100}, {"with_embedding": True}, {"num_layers": 2}],
)
def test_what_is_the_targets_own_cannot_be_chosen(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        head_config(tmp_path, tmp_path, tmp_path, kind="mtp", **options)
