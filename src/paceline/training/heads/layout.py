"""What ``config.json`` says of a head in the speculators format. Knows no tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import TrainingError
from paceline.loading.checkpoint import Checkpoint
from paceline.loading.head_kinds import MTP
from paceline.models.config import ModelConfig, Multipliers, RopeConfig
from paceline.models.families.config_json import config_from_hf

_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}
"""What configurations call them, where it is not their name."""
_TRAINED = "original_max_position_embeddings"


def dflash_layers(target: ModelConfig, num_layers: int) -> ModelConfig:
    """A DFlash head's layers, whose keys and values, as many as queries, bring features in."""
    layers = layers_config(target)
    kv_heads = target.num_heads
    sizes = {"num_layers": num_layers, "num_kv_heads": kv_heads}
    return layers.with_traits({**sizes, "attention.qk_norm": True})


def layers_config(target: ModelConfig) -> ModelConfig:
    """The shape of a head's layer: the target's, without what only some families have.

    Multipliers of the target are part of the weights that the head begins with.
    """
    traits = {
        "num_layers": 1,
        "attention.qkv_bias": False,
        "attention.o_bias": False,
        "attention.sliding_window": 0,
        "attention.sliding_layers": (),
        "attention.softcap": 0.0,
        "attention.scale": 0.0,
        "mlp.bias": False,
        "norms.after": False,
        "norms.plus_one": False,
        "positions.local_rope": None,
        "multipliers": Multipliers(),
    }
    return target.with_traits(traits)


def speculators_config(
    target: Checkpoint,
    verifier: str,
    layers: ModelConfig,
    num_columns: int,
    kind: str,
    num_drafted: int,
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """The ``config.json`` of a head in the speculators format.

    Args:
        verifier: the target's name or path for engines that read this.
        layers: the shape of the head's layers.
        num_columns: of the output matrix; 0 where it is the target's.
        num_drafted: tokens that the head was trained to draft.
        own: what this kind of head alone says.

    Raises:
        TrainingError: a configuration cannot say how the head's layers compute.
    """
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafted,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    architectures = list(target.hf_config.get("architectures") or [])
    if kind == MTP:  # the format describes the target's layers here, of which the head has one
        layers = dataclasses.replace(layers, num_layers=target.config.num_layers)
    output = {"draft_vocab_size": num_columns} if num_columns else {}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": _layers_description(target, layers),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        **output,
        **own,
    }


def _layers_description(target: Checkpoint, c: ModelConfig) -> dict[str, Any]:
    """The head's layers as transformers would describe them."""
    told: dict[str, Any] = {
        "model_type": "qwen3" if c.attention.qk_norm else "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": _ACTIVATIONS.get(c.mlp.activation, c.mlp.activation),
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.norms.eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": c.positions.rope.theta,
    }
    if c.positions.rope.scaling != "default":
        told["rope_scaling"] = _scaling(c.positions.rope)
    read = config_from_hf(told)
    if any(
        ours != said
        for ours, said in (
            (c.mlp.activation, read.mlp.activation),
            (c.positions.rope, read.positions.rope),
            (c.norms.eps, read.norms.eps),
        )
    ):
        raise TrainingError(
            f"{target.name} has {c.mlp.activation} as its activation and rotary embeddings of type "
            f"{c.positions.rope.scaling}, which the configuration of a head cannot say"
        )
    return told


def _scaling(rope: RopeConfig) -> dict[str, Any]:
    """A rotary rule by its Hugging Face names."""
    numbers: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in rope.params
    }
    if _TRAINED in numbers:
        numbers[_TRAINED] = int(numbers[_TRAINED])
    if "truncate" in numbers:
        numbers["truncate"] = bool(numbers["truncate"])
    return {"rope_type": rope.scaling, "factor": rope.factor, **numbers}
