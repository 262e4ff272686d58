"""Logits of random EAGLE-3 and EAGLE-3.1 heads as the speculators package computes them, by depth.

``PACELINE_SPECULATORS_PYTHON`` names an interpreter that has the package, which pins what it needs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.proposers.heads import _fusion, build
from paceline.proposers.heads.checkpoint import load_head
from tests.arrays import assert_close
from tests.proposers.heads import (
    HIDDEN,
    TAPS,
    head_config,
    head_options,
    head_tensors,
    target_info,
    write_head,
)
from tests.proposers.mtp import forward
from tests.proposers.test_heads import with_norms
from tests.proposers.test_parallel_speculators import PYTHON, VERIFIED
from tests.toy import VOCAB, toy_runner

SCRIPT = Path(__file__).parents[1] / "lab" / "train" / "speculators_logits.py"
ROWS, STEPS = 12, 3
NORMS = {f"fc_norm.{i}.weight": HIDDEN for i in range(len(TAPS))}
FORMS: dict[str, dict[str, Any]] = {
    "3": {},
    "3 with a norm before": {"norm_before_fc": True, "norm_before_residual": True},
    "3.1": {"fc_norm": True, "norm_output": True},
    "3.1 without norms of features": {"norm_output": True},
}


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="PACELINE_SPECULATORS_PYTHON names no interpreter")
@pytest.mark.parametrize("form", FORMS)
def test_speculators_computes_the_same_at_every_depth(form: str, tmp_path: Path) -> None:
    """A row's drafts read the text's next tokens there, and what the head put out before them."""
    fields, tensors = FORMS[form], head_tensors(11)
    if fields.get("fc_norm"):
        tensors = with_norms(tensors, **NORMS)
    if fields.get("norm_before_fc"):
        tensors = with_norms(tensors, **{"input_norm.weight": len(TAPS) * HIDDEN})
    folder = write_head(tmp_path / "head", head_config(**fields, **VERIFIED), tensors)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    features = 3 * torch.randn(ROWS, len(TAPS), HIDDEN, generator=generator)
    given = {"features": features.flatten(1)[None], "input_ids": tokens[None]}
    save_file(given, tmp_path / "inputs")
    command = [PYTHON, SCRIPT, folder, tmp_path / "inputs", tmp_path / "logits"]
    subprocess.run(command, check=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    wanted = load_file(tmp_path / "logits")

    proposer = build(head_options(model=str(folder)), target_info(toy_runner()))
    ops = proposer.runner.decoder.ops
    fused = _fusion(load_head(str(folder)), ops, len(TAPS), HIDDEN)(features.numpy())
    for row in (0, 3, ROWS - STEPS):
        inputs = fused[: row + 1]
        for step in range(STEPS):
            read = tokens[: row + step + 1].tolist()
            request = 100 * row + step
            logits, outputs = forward(proposer, request, read, torch.from_numpy(inputs))
            assert_close(logits[-1], wanted[f"step{step}"][row], atol=1e-4, rtol=1e-4)
            inputs = np.concatenate([inputs, outputs[-1:].numpy()])
            proposer.runner.kv.free(request)
