"""What is written of a head's layers: who reads it computes what was trained."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import TrainingError
from paceline.loading.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.families.config_json import config_from_hf
from paceline.models.heads import EAGLE3
from paceline.proposers.heads.checkpoint import layer_config
from paceline_lab.train.heads.kinds import dflash_layers, layers_config, speculators_config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "truncate": False,
    "beta_fast": 16.0,
}
TARGETS: dict[str, dict[str, Any]] = {
    "what the family has": {"model_type": "gemma2"},
    "a base of one kind of layer": {"model_type": "gemma3_text"},
    "the length before the extension": {
        "model_type": "phi3",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 512,
        "rope_scaling": LONG,
    },
    "llama3": {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "yarn": {"model_type": "qwen3", "rope_parameters": {"rope_theta": 1e6, **YARN}},
    "linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "an alpha": {
        "model_type": "hunyuan_v1_dense",
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
}


def _written(raw: dict[str, Any], layers: ModelConfig) -> dict[str, Any]:
    target = Checkpoint(config_from_hf(raw), {}, None, "toy", hf_config=raw)
    return speculators_config(target, "toy", layers, 0, EAGLE3, 3, {})


@pytest.mark.parametrize("told", TARGETS)
def test_a_head_is_read_with_the_arithmetic_it_was_trained_with(told: str) -> None:
    raw = {**SIZES, **TARGETS[told]}
    target = config_from_hf(raw)
    for layers in (layers_config(target), dflash_layers(target, 2)):
        read = config_from_hf(layer_config(_written(raw, layers)))
        assert (read.mlp.activation, read.positions.rope, read.norms.eps, read.max_position) == (
            layers.mlp.activation,
            layers.positions.rope,
            layers.norms.eps,
            layers.max_position,
        )


def test_what_a_configuration_cannot_say_is_refused() -> None:
    raw = {
        **SIZES,
        "model_type": "llama",
        "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    }
    with pytest.raises(TrainingError, match=r"toy has silu .* proportional, which"):
        _written(raw, layers_config(config_from_hf(raw)))
