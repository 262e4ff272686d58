"""What ``config.json`` says of a head in the speculators format. Knows no tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.head_kinds import MTP


def dflash_layers(target: ModelConfig, num_layers: int) -> ModelConfig:
    """The shape of a DFlash head's layers: as many heads for keys and values as for queries.

    They are the only way by which features come in.
    """
    layers = layers_config(target)
    kv_heads = target.num_heads
    return dataclasses.replace(layers, num_layers=num_layers, num_kv_heads=kv_heads, qk_norm=True)


def layers_config(target: ModelConfig) -> ModelConfig:
    """The shape of a head's layer: the target's, without what only some families have.

    Multipliers of the target are part of the weights that the head begins with.
    """
    return dataclasses.replace(
        target,
        num_layers=1,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        post_norms=False,
        norm_plus_one=False,
        sliding_window=0,
        sliding_layers=(),
        local_rope=None,
        attention_softcap=0.0,
        attention_scale=0.0,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_divisor=1.0,
        logits_softcap=0.0,
    )


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
    told = {**target.hf_config, **(target.hf_config.get("text_config") or {})}
    rope = {k: told[k] for k in ("rope_theta", "rope_scaling", "rope_parameters") if k in told}
    return {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": told.get("hidden_act") or told.get("hidden_activation") or "silu",
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **rope,
    }
