"""Gemma families whose layers differ from one another, as data.

Continues the table of :mod:`paceline.models.families.families`, which says what its fields mean.
Knows no file and builds no configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.models.families.experts import ExpertKeys
from paceline.models.families.families import Family
from paceline.models.families.rope import FULL, SLIDING

_BOTH = ("attention.qkv_bias", "attention.o_bias")
_GEMMA4 = Family(
    {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 1.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
        "tie_word_embeddings": True,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    {
        "norms.after": True,
        "attention.qk_norm": True,
        "attention.value_norm": True,
        "layer_scales": True,
    },
    _BOTH,
    slides="alternately",
    gemma=True,
    per_layer=True,
    last_full=True,
    experts=ExpertKeys(
        "moe_intermediate_size",
        shared="intermediate_size",
        per_token="top_k_experts",
        switch="enable_moe_block",
        own_norms=True,
        own_scales=True,
    ),
)

_UNIFIED = replace(
    _GEMMA4,
    defaults={
        **_GEMMA4.defaults,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "hidden_size_per_layer_input": 0,
    },
    experts=None,
)

_GEMMA3N = Family(
    {
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 1.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    {"norms.after": True, "attention.qk_norm": True, "attention.value_norm": True},
    _BOTH,
    slides="alternately",
    gemma=True,
    per_layer=True,
)

GEMMA_FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("gemma4_text", "gemma4"), _GEMMA4),
    **dict.fromkeys(("gemma3n_text", "gemma3n"), _GEMMA3N),
    **dict.fromkeys(("gemma4_unified_text", "gemma4_unified"), _UNIFIED),
}
"""More families, by ``model_type``."""
