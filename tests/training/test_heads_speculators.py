"""Heads that are written are read by the speculators package, and compute the same there.

``PACELINE_SPECULATORS_PYTHON`` names an interpreter that has the package, which pins what it needs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.models.checkpoint import load_checkpoint
from paceline.training.heads.batches import Batch
from paceline.training.heads.eagle3 import Eagle3, Grid
from paceline.training.heads.initial import TargetWeights, layer_config
from paceline.training.heads.losses import unrolled
from paceline.training.heads.train import train_head
from paceline.training.lm import LMTrainingResult
from paceline.training.ops import TrainingOps
from tests.training.test_heads import head_config, traces  # noqa: F401

PYTHON = os.environ.get("PACELINE_SPECULATORS_PYTHON", "")
SCRIPT = Path(__file__).with_name("speculators_logits.py")
ROWS = 20


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
    inputs = {"features": features[None], "input_ids": tokens[None]}
    save_file(inputs, tmp_path / "inputs")
    command = [PYTHON, str(SCRIPT), *(str(tmp_path / n) for n in ("head", "inputs", "logits"))]
    subprocess.run(command, check=True, timeout=280)
    found = load_file(tmp_path / "logits")

    head = Eagle3(layer_config(target.config), tensors, embedding, TrainingOps(), 64)
    every = torch.arange(ROWS)
    grid, nothing = Grid(1, ROWS, every), torch.zeros(ROWS, 1)
    batch = Batch(
        tokens=tokens,
        positions=every,
        features=features,
        grid=grid,
        wanted=every,
        wanted_grid=grid,
        left=every.flip(0),
        emitted=tokens,
        top_ids=nothing.long(),
        top_probs=nothing,
    )
    differences = []
    for step, (rows, x) in enumerate(unrolled(head, batch, 3, every)):
        ours = head.normed(x) @ tensors["lm_head.weight"].T
        differences.append((ours - found[f"step{step}"][rows - step]).abs().max().item())
    print("largest differences of logits, by step:", differences)
    assert max(differences) < 1e-4
