"""Files of the dense families and of hybrids in llama.cpp itself: it reads them as Paceline does.

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

from paceline_lab.quality.llama_peer import LlamaPeer
from paceline_lab.quality.quality import Window
from tests.loading.gguf_writing import CASES, IDS, convert, write_gguf
from tests.loading.test_gguf_hybrids import CHANGES as OF_HYBRIDS
from tests.loading.test_gguf_hybrids import FAMILIES as HYBRIDS
from tests.models.reference import DENSE, FULL, SLIDING, VOCAB, Driver, make_model

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


def full_after(sliding: int, layers: int) -> dict[str, Any]:
    """A full layer behind each so many sliding ones."""
    step = sliding + 1
    types = [FULL if i % step == sliding else SLIDING for i in range(layers)]
    return {"num_hidden_layers": layers, "layer_types": types}


# What llama.cpp takes from the number of layers, or does not know.
CHANGES: dict[str, dict[str, Any]] = {
    "olmo3": full_after(3, 4),
    "cohere2": full_after(3, 4),
    "exaone4": full_after(3, 64),
    "starcoder2": {"sliding_window": None},
    "ernie4-5": {"use_bias": False},
    "seed-oss": {"attention_out_bias": False},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, **full_after(5, 6)},
    "gemma4": {"final_logit_softcapping": 30.0},
    "gemma4-unified": {"final_logit_softcapping": 30.0},
    "gemma4-inputs": {"num_kv_shared_layers": 2},
}
GEMMA3N = {
    **full_after(4, 25),
    "intermediate_size": [112] * 25,
    "num_kv_shared_layers": 5,
    "hidden_size_per_layer_input": 256,
    "laurel_rank": 64,
    "vocab_size_per_layer_input": VOCAB,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 15,
    "final_logit_softcapping": 30.0,
}
"""Sizes that llama.cpp has as constants."""
PLAIN = {"tokenizer.ggml.model": "none", "ARCH.vocab_size": VOCAB}
REFUSED = {"llama4-dense", "llama4-dense-full"}  # it wants experts in every Llama 4
FAMILIES = [each for each in CASES if each in DENSE.keys() - REFUSED - {"gemma3n"}]


def check(path: Path) -> None:
    """Both read the file as the same model."""
    got = np.zeros((len(TOKENS) - 1, VOCAB), np.float32)
    settings = {"vocab_size": VOCAB, "longest": 64, "threads": 1}
    with LlamaPeer(str(PYTHON), path, path.with_name("peer"), **settings) as peer:
        peer.logits(Window(TOKENS, 1), got)
    ours = Driver.of(path, max_len=64).chunk(TOKENS).numpy()[:-1]
    assert ours.std() > 0.5
    assert np.abs(got - ours).max() < NEAR


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "gemma3"])
def test_a_file_means_the_same(family: str, tmp_path: Path) -> None:
    changes = CHANGES.get(family, {})
    metadata: dict[str, Any] = dict(PLAIN)
    if "layer_types" in changes:
        pattern = [kind == SLIDING for kind in changes["layer_types"]]
        metadata["ARCH.attention.sliding_window_pattern"] = pattern
    if "query_pre_attn_scalar" in changes:
        metadata["ARCH.attention.scale"] = changes["query_pre_attn_scalar"] ** -0.5
    path = tmp_path / "model.gguf"
    convert(family, path, metadata=metadata, changes=changes)
    check(path)


def test_gemma3n_means_the_same(tmp_path: Path) -> None:
    """Its layers with others' keys and values have some of their own, which nothing reads.

    Random layers in this number would make noise of any rounding, so each adds little.
    """
    model = make_model("gemma3n", **GEMMA3N)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers." in name and "post_" in name:
                parameter.mul_(0.1)
    unread = {
        f"blk.{layer}.attn_{part}.weight": np.ones(shape)
        for layer in range(20, 25)
        for part, shape in (("k", (32, 64)), ("v", (32, 64)), ("k_norm", (16,)))
    }
    path = tmp_path / "model.gguf"
    tensors = model.state_dict()
    write_gguf(path, model.config, tensors, metadata={**IDS, **PLAIN}, extra_tensors=unread)
    check(path)


WHOLE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
EVEN = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "attention_bias": False}
HYBRID_CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3-next", "qwen3-5", "qwen3-5-moe"), EVEN),
    "granite-hybrid": {"intermediate_size": 72},
    "granite-hybrid-moe": {"position_embedding_type": None},
    "bamba": {"rope_parameters": WHOLE},  # of a part of each head it rotates other pairs
}
"""Keys and values of one size in delta nets, and what else llama.cpp takes for granted."""


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrids_file_means_the_same(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    changes = OF_HYBRIDS.get(family, {}) | HYBRID_CHANGES.get(family, {})
    convert(family, path, metadata=dict(PLAIN), changes=changes)
    check(path)
