"""Logits of random DFlash heads as the speculators package computes them.

``PACELINE_SPECULATORS_PYTHON`` names an interpreter that has the package, which pins what it needs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.models.decoder import Decoder
from paceline.models.ops.native import why_not_native
from paceline.models.ops.resolve import resolve_ops
from paceline.proposers.heads.build import _fusion
from paceline.proposers.heads.checkpoint import load_head
from paceline.runtime.kv_cache import KVCache
from paceline.runtime.model_runner import ModelRunner
from paceline.span import Span
from tests.proposers.dflash import MASK, SIZE, dflash_config, dflash_tensors, sliding_layers
from tests.proposers.heads import HIDDEN, TAPS, write_head
from tests.toy import VOCAB

PYTHON = os.environ.get("PACELINE_SPECULATORS_PYTHON", "")
SCRIPT = Path(__file__).with_name("speculators_blocks.py")
ROWS = 40
ANCHORS = (1, 6, 7, 25, 33)
BACKENDS = ["reference", *([] if why_not_native() else ["native"])]
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    # Sliding layers see the context up to the window before a block there, before a row here:
    # this window is wide enough for that to make no difference.
    "sliding": sliding_layers(window=64),
    "sliding and seeing ahead": sliding_layers(64) | {"sliding_window_non_causal": True},
}


def ours(folder: Path, tokens: torch.Tensor, features: torch.Tensor, backend: str) -> torch.Tensor:
    """Logits of the blocks of all anchors, ``[anchors * block, columns]``."""
    head = load_head(str(folder))
    ops = resolve_ops("float32", "cpu", True, backend)
    decoder = Decoder(head.decoder.config, head.decoder.tensors, ops, 64)
    memory = ops.kv_memory(decoder.config, 40, "float32")
    runner = ModelRunner(decoder, KVCache(memory, prefix_caching=False))
    known = _fusion(head, ops, len(TAPS), HIDDEN)(features.view(ROWS, len(TAPS), HIDDEN))
    spans = []
    for anchor in ANCHORS:
        runner.kv.open(anchor)
        assert runner.kv.reserve(anchor, anchor)
        context = Span.chunk(anchor, 0, tokens[:anchor].tolist(), sample=False)
        runner.write_kv(runner.pack([context]), known[:anchor].contiguous())
        runner.kv.commit(anchor, range(anchor))
        assert runner.kv.reserve(anchor, SIZE)
        block = [int(tokens[anchor]), *[MASK] * (SIZE - 1)]
        spans.append(Span(anchor, anchor, block, range(-1, SIZE - 1), range(SIZE)))
    return runner.forward(runner.pack(spans)).logits


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="PACELINE_SPECULATORS_PYTHON names no interpreter")
def test_speculators_computes_the_same(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    features = torch.randn(ROWS, len(TAPS) * HIDDEN, generator=generator)
    anchors = torch.zeros(1, ROWS).index_fill(1, torch.tensor(ANCHORS), 1.0)
    inputs = {"features": features[None], "input_ids": tokens[None], "anchors": anchors}
    for form, fields in FORMS.items():
        write_head(tmp_path / form / "head", dflash_config(**fields), dflash_tensors(4))
        save_file(inputs, tmp_path / form / "inputs")
    command = [PYTHON, str(SCRIPT), *(str(tmp_path / form) for form in FORMS)]
    subprocess.run(command, check=True, timeout=280)
    for form in FORMS:
        found = load_file(tmp_path / form / "logits")["logits"]
        for backend in BACKENDS:
            logits = ours(tmp_path / form / "head", tokens, features, backend)
            difference = (logits - found).abs().max().item()
            print("largest difference of logits:", form, backend, difference)
            assert difference < 1e-4
