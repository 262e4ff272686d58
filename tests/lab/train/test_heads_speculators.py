"""Heads that are written are read by the speculators package, and compute the same there.

``PACELINE_SPECULATORS_PYTHON`` names an interpreter that has the package, which pins what it needs.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.loading.checkpoint import load_checkpoint
from paceline_lab.train.heads.initial import TargetWeights
from paceline_lab.train.heads.kinds import dflash_layers, layers_config
from paceline_lab.train.heads.modules import DFlash, Eagle3, Mtp
from paceline_lab.train.heads.train import train_head
from paceline_lab.train.lm import LMTrainingResult
from paceline_lab.train.ops import TrainingOps
from tests.lab.train.test_heads import head_config, one_text, traces  # noqa: F401

PYTHON = os.environ.get("PACELINE_SPECULATORS_PYTHON", "")
SCRIPT = Path(__file__).with_name("speculators_logits.py")
BLOCKS = Path(__file__).parents[2] / "proposers" / "speculators_blocks.py"
ROWS = 20


def _logits(folder: Path, tokens: torch.Tensor, features: torch.Tensor) -> dict[str, torch.Tensor]:
    """The package's, by step, of the head in a folder's ``head``."""
    save_file({"features": features[None], "input_ids": tokens[None]}, folder / "inputs")
    command = [PYTHON, str(SCRIPT), *(str(folder / n) for n in ("head", "inputs", "logits"))]
    subprocess.run(command, check=True, timeout=280)
    return load_file(folder / "logits")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="PACELINE_SPECULATORS_PYTHON names no interpreter")
def test_speculators_computes_the_same(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    train_head(head_config(trained.folder, traces, tmp_path / "head", steps=3, with_embedding=True))
    target = load_checkpoint(trained.folder)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    embedding, taps = TargetWeights(target).embedding, tensors["fc.weight"].shape[1]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, len(embedding), (ROWS,), generator=generator)
    features = torch.randn(ROWS, taps, generator=generator)
    found = _logits(tmp_path, tokens, features)

    head = Eagle3(layers_config(target.config), tensors, embedding, TrainingOps(), 64)
    every = torch.arange(ROWS)
    batch = one_text(tokens, features)
    differences = []
    for step, (rows, x) in enumerate(head.steps(batch, 3, every)):
        ours = x @ tensors["lm_head.weight"].T
        differences.append((ours - found[f"step{step}"][rows - step]).abs().max().item())
    print("largest differences of logits, by step:", differences)
    assert max(differences) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="PACELINE_SPECULATORS_PYTHON names no interpreter")
def test_speculators_computes_the_same_of_mtp(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Its steps are those of :func:`test_speculators_computes_the_same` by themselves: all rows
    read what all rows put out in the step before."""
    train_head(head_config(trained.folder, traces, tmp_path / "head", steps=3, kind="mtp"))
    weights = TargetWeights(load_checkpoint(trained.folder))
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, len(weights.embedding), (ROWS,), generator=generator)
    inputs = torch.randn(ROWS, weights.config.hidden_size, generator=generator)
    found = _logits(tmp_path, tokens, inputs)
    head = Mtp(layers_config(weights.config), tensors, weights.embedding, TrainingOps(), 64)
    count = len(found["step0"])
    for step in range(3):
        read = tokens[step + 1 : step + 1 + count]
        _, inputs = next(iter(head.steps(one_text(read, inputs[:count]), 1, torch.arange(count))))
        torch.testing.assert_close(inputs @ weights.head.T, found[f"step{step}"], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="PACELINE_SPECULATORS_PYTHON names no interpreter")
def test_speculators_computes_the_same_blocks(
    trained: LMTrainingResult,
    traces: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    options = {"kind": "dflash", "num_layers": 2, "steps": 3, "with_embedding": True}
    train_head(head_config(trained.folder, traces, tmp_path / "head", **options))
    told = json.loads((tmp_path / "head" / "config.json").read_text())
    size, mask = told["block_size"], told["mask_token_id"]
    target = load_checkpoint(trained.folder)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    embedding, taps = TargetWeights(target).embedding, tensors["fc.weight"].shape[1]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, len(embedding), (ROWS,), generator=generator)
    features = torch.randn(ROWS, taps, generator=generator)
    anchors = torch.arange(1, ROWS - size)  # the package leaves out what ends beyond the text
    flags = torch.zeros(1, ROWS).index_fill(1, anchors, 1.0)
    inputs = {"features": features[None], "input_ids": tokens[None], "anchors": flags}
    save_file(inputs, tmp_path / "inputs")
    subprocess.run([PYTHON, str(BLOCKS), str(tmp_path)], check=True, timeout=280)
    found = load_file(tmp_path / "logits")["logits"].view(len(anchors), size, -1)

    layers = dflash_layers(target.config, 2)
    head = DFlash(layers, tensors, embedding, TrainingOps(), 64, size, mask)
    batch = one_text(tokens[1:], features[:-1])  # an anchor's block sees the features before it
    for depth, (_, x) in enumerate(head.steps(batch, size, anchors - 1), 1):
        ours = x @ tensors["lm_head.weight"].T
        assert (ours - found[:, depth]).abs().max() < 1e-4
