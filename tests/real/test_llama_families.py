"""Files of the dense families in llama.cpp itself: it reads them as Paceline does.

Needs an interpreter that has llama-cpp-python or xllamacpp: the one that ``make peers`` installs,
or that of ``PACELINE_LLAMA_PYTHON``. Skips without.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.workbench.llama_peer import LlamaPeer
from paceline.workbench.quality import Window
from tests.models.gguf_writing import CASES, convert
from tests.models.reference import DENSE, FULL, SLIDING, VOCAB, Driver

PYTHON = Path(os.environ.get("PACELINE_LLAMA_PYTHON", ".peers/llama/bin/python"))
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"there is no {PYTHON}: make peers"),
]
TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
NEAR = 0.1
"""llama.cpp holds keys and values in 16 bits; rows in a wrong order differ by several units."""


def every_fourth_full(layers: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "layer_types": [FULL if i % 4 == 3 else SLIDING for i in range(layers)],
    }


# What llama.cpp takes from the number of layers, or does not know.
CHANGES: dict[str, dict[str, Any]] = {
    "olmo3": every_fourth_full(4),
    "cohere2": every_fourth_full(4),
    "exaone4": every_fourth_full(64),
    "starcoder2": {"sliding_window": None},
    "ernie4-5": {"use_bias": False},
    "seed-oss": {"attention_out_bias": False},
}


REFUSED = {"llama4-dense", "llama4-dense-full"}  # it wants experts in every Llama 4


@pytest.mark.parametrize("family", [each for each in CASES if each in DENSE.keys() - REFUSED])
def test_a_file_means_the_same(family: str, tmp_path: Path) -> None:
    changes = CHANGES.get(family, {})
    metadata: dict[str, Any] = {"tokenizer.ggml.model": "none", "ARCH.vocab_size": VOCAB}
    if "layer_types" in changes:
        pattern = [kind == SLIDING for kind in changes["layer_types"]]
        metadata["ARCH.attention.sliding_window_pattern"] = pattern
    path = tmp_path / "model.gguf"
    convert(family, path, metadata=metadata, changes=changes)
    got = np.zeros((len(TOKENS) - 1, VOCAB), np.float32)
    settings = {"vocab_size": VOCAB, "longest": 64, "threads": 1}
    with LlamaPeer(str(PYTHON), path, tmp_path / "peer", **settings) as peer:
        peer.logits(Window(TOKENS, 1), got)
    ours = Driver.of(path, max_len=64).chunk(TOKENS).numpy()[:-1]
    assert ours.std() > 0.5
    assert np.abs(got - ours).max() < NEAR
