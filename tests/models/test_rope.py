"""Rotary tables against transformers' rotary modules, and where the two differ on purpose."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config, PhimoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from paceline.backends.rows.reference import ReferenceOps
from paceline.models.families.config_json import config_from_hf
from paceline.models.layer_sizes import RopeConfig
from paceline.models.rope import RotaryTable, rope_tables
from tests.arrays import assert_close, same

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-exact": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "attention_factor": 1.5,
    },
    "longrope": {
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
}


def raw_config(scaling: str, old_style: bool, theta: float = 500.0) -> dict[str, Any]:
    entry = {"rope_type": scaling.split("-")[0], **SCALINGS[scaling]}
    if not old_style:
        rope: dict[str, Any] = {"rope_parameters": {**entry, "rope_theta": theta}}
    else:
        old = {("type" if key == "rope_type" else key): value for key, value in entry.items()}
        rope = {"rope_theta": theta, "rope_scaling": None if scaling == "default" else old}
    return {"model_type": "llama", **SIZES, **HEADS, **rope}


def reference(raw: dict[str, Any], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = LlamaConfig(**raw_without_type(raw))
    positions = torch.arange(length)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, length, 1), positions)
    return cos[0], sin[0]


def raw_without_type(raw: dict[str, Any]) -> dict[str, Any]:
    import copy

    return copy.deepcopy({key: value for key, value in raw.items() if key != "model_type"})


@pytest.mark.parametrize("old_style", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("length", [48, 200, 300])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_tables(scaling: str, length: int, old_style: bool) -> None:
    """A table for this length is what the reference uses for a text of this length."""
    raw = raw_config(scaling, old_style)
    cos, sin = rope_tables(config_from_hf(raw).positions.rope, 16, length)
    assert cos.shape == sin.shape == (length, 8)
    assert cos.dtype == sin.dtype == np.float32
    want_cos, want_sin = reference(raw, length)
    assert_close(np.concatenate((cos, cos), -1), want_cos, atol=5e-5, rtol=0)
    assert_close(np.concatenate((sin, sin), -1), want_sin, atol=5e-5, rtol=0)


def test_scalings_differ() -> None:
    """Each rule matters at this size; otherwise the comparisons above would prove nothing."""
    tables = {}
    for scaling in SCALINGS:
        rope = config_from_hf(raw_config(scaling, old_style=False)).positions.rope
        tables[scaling] = rope_tables(rope, 16, 300)[0]
    names = list(tables)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert np.abs(tables[one] - tables[other]).max() > 0.01, (one, other)


@pytest.mark.parametrize("max_len", [64, 65])
def test_partial_rotary_of_phi(max_len: int) -> None:
    """Half of each head turns, and the length decides which factors hold."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    }
    raw = {**SIZES, **HEADS, "rope_parameters": rope, "original_max_position_embeddings": 64}
    config = Phi3Config(**raw_without_type(raw), pad_token_id=0)
    positions = torch.arange(max_len)[None]
    want = Phi3RotaryEmbedding(config)(torch.zeros(1, max_len, 1), positions)
    ours = config_from_hf({"model_type": "phi3", **raw}).positions.rope
    assert ours.dim == 8
    for table, expected in zip(rope_tables(ours, 16, max_len), want, strict=True):
        assert_close(np.concatenate((table, table), -1), expected[0], atol=5e-5, rtol=0)


@pytest.mark.parametrize("max_len", [64, 65])
def test_phi_moe_says_what_long_texts_are_multiplied_with(max_len: int) -> None:
    """With equal factors: transformers keeps the short ones for long texts, unlike the model."""
    factors = [1.0 + 0.1 * i for i in range(8)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "original_max_position_embeddings": 64,
        "short_factor": factors,
        "long_factor": factors,
        "short_mscale": 1.1,
        "long_mscale": 1.3,
    }
    raw = {**SIZES, **HEADS, "num_local_experts": 4, "rope_parameters": rope}
    positions = torch.arange(max_len)[None]
    module = PhimoeRotaryEmbedding(PhimoeConfig(**raw_without_type(raw)))
    want = module(torch.zeros(1, max_len, 1), positions)
    ours = config_from_hf({"model_type": "phimoe", **raw}).positions.rope
    for table, expected in zip(rope_tables(ours, 16, max_len), want, strict=True):
        assert_close(np.concatenate((table, table), -1), expected[0], atol=5e-5, rtol=0)


def test_far_positions_keep_their_precision() -> None:
    """Angles are float64: at a million a float32 angle is off by hundredths."""
    position, theta = 1_000_003, 1e6
    cos, _ = rope_tables(RopeConfig(theta=theta, dim=64), 64, position + 1)
    exact = [math.cos(position * theta ** (-2 * i / 64)) for i in range(32)]
    assert_close(cos[position].astype(float), np.array(exact), atol=1e-7, rtol=0)


def test_a_longer_table_begins_like_a_shorter_one() -> None:
    """Chunked construction leaves no seam, and rows depend on the position alone."""
    rope = RopeConfig(dim=8)
    long_cos, long_sin = rope_tables(rope, 8, 2600)
    table = RotaryTable(rope, 8, 2600, ReferenceOps())
    for length in (100, 1025, 5000):  # the last is more than there can be
        table.reach(length)
        have = min(length, 2600)
        assert same(table.cos[:have], np.concatenate((long_cos, long_cos), -1)[:have])
        assert same(table.sin[:have], np.concatenate((-long_sin, long_sin), -1)[:have])


def test_yarn_extends_a_context_that_is_stated_unextended(tmp_path: Path) -> None:
    raw = raw_config("yarn", old_style=True)
    assert config_from_hf(raw).max_position == 256
    assert config_from_hf({**raw, "max_position_embeddings": 64}).max_position == 256
