"""An MTP head that the speculators package wrote is read, and computes the same as there.

``PACELINE_SPECULATORS_PYTHON`` names an interpreter that has the package, which pins what it needs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.arrays import assert_close
from tests.proposers.mtp import forward, toy_mtp
from tests.toy import TOY, VOCAB, toy_folder, toy_runner, toy_tensors

PYTHON = os.environ.get("PACELINE_SPECULATORS_PYTHON", "")
SCRIPT = Path(__file__).with_name("speculators_mtp.py")
ROWS = 24


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="PACELINE_SPECULATORS_PYTHON names no interpreter")
def test_speculators_computes_the_same(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    hidden = torch.randn(ROWS, TOY.hidden_size, generator=generator)
    embedding = toy_tensors()["model.embed_tokens.weight"]
    save_file({"embedding": embedding, "tokens": tokens, "hidden": hidden}, tmp_path / "inputs")
    (tmp_path / "toy").mkdir()
    layer = (toy_folder(tmp_path / "toy") / "config.json").read_text()
    folder, outputs = tmp_path / "head", tmp_path / "outputs"
    subprocess.run([PYTHON, SCRIPT, layer, tmp_path / "inputs", folder, outputs], check=True)
    wanted, proposer = load_file(outputs), toy_mtp(toy_runner(), model=str(folder))
    read, inputs = tokens.tolist(), hidden
    for step in range(2):  # the second reads what the first put out
        read = read[1:]
        count = len(wanted[f"step{step}"])
        logits, inputs = forward(proposer, step, read, inputs[: len(read)].contiguous())
        assert_close(logits[:count], wanted[f"step{step}"], atol=1e-4, rtol=1e-4)
