"""Families of dense decoders that leave Llama's form in more than biases, as data.

Continues the table of :mod:`paceline.models.hf_families`, which says what its fields mean. Knows no
file and builds no configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.models.hf_families import Family
from paceline.models.hf_layout import Layout

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BOTH = ("qkv_bias", "o_bias")
_ONLY_POST_NORMS = {"pre_norms": False, "post_norms": True}
_WHOLE_NORMS = {"qk_norm": True, "qk_norm_whole": True}
_OLMO = {**_DEFAULTS, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}
_GLM = {
    **_DEFAULTS,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "bos_token_id": None,
    "eos_token_id": [151329, 151336, 151338],
}
_GLM4_NAMES = (
    (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
    (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
    (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
)
HUNYUAN_NAMES = ((r"\.query_layernorm\.", ".q_norm."), (r"\.key_layernorm\.", ".k_norm."))
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_divisor",
}

DENSE_FAMILIES: Mapping[str, Family] = {
    "smollm3": Family(
        {
            **_DEFAULTS,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        biases=_BOTH,
        mlp_bias=True,
        slides="late",
        rotates="listed",
    ),
    "olmo2": Family(_OLMO, {**_ONLY_POST_NORMS, **_WHOLE_NORMS}, _BOTH),
    "olmo3": Family(
        {
            **_OLMO,
            "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        {**_ONLY_POST_NORMS, **_WHOLE_NORMS},
        _BOTH,
        slides="alternately",
        # A scaling is that of the other layers alone.
        keys={"rope_local_base_freq": "rope_theta"},
    ),
    "glm": Family(_GLM, biases=("qkv_bias",), partial_rotary=True, layout=Layout(interleaved=True)),
    "glm4": Family(
        _GLM,
        {"post_norms": True},
        ("qkv_bias",),
        partial_rotary=True,
        layout=Layout(_GLM4_NAMES, interleaved=True),
    ),
    "exaone4": Family(
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "bos_token_id": 0,
        },
        {**_ONLY_POST_NORMS, "qk_norm": True},
        slides="alternately",
        rotates="sliding",
    ),
    "ernie4_5": Family(
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        switches={"use_bias": (*_BOTH, "mlp_bias")},
        layout=Layout(interleaved=True),
    ),
    "hunyuan_v1_dense": Family(
        {**_DEFAULTS, "rms_norm_eps": 1e-5},
        {"qk_norm": True, "qk_norm_last": True},
        _BOTH,
        refused=("use_cla",),
        layout=Layout(HUNYUAN_NAMES),
    ),
    "seed_oss": Family(
        {
            **_DEFAULTS,
            "max_position_embeddings": 524288,
            "head_dim": 128,
            "attention_bias": True,
            "bos_token_id": 0,
        },
        biases=("qkv_bias",),
        mlp_bias=True,
        switches={"attention_out_bias": ("o_bias",)},
    ),
    "ministral": Family(
        {
            **_DEFAULTS,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        slides="listed",
    ),
    "ministral3": Family(
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_theta": 1e6,
        },
        slides="always",
    ),
    "internlm3": Family(
        {**_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "head_dim": 128},
        biases=_BOTH,
        mlp_bias=True,
        keys={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    ),
    "minicpm": Family(
        {**_DEFAULTS, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        biases=_BOTH,
        multipliers=_MULTIPLIERS,
        depth_scaled=True,
    ),
    "helium": Family(
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-8,
            "max_position_embeddings": 4096,
            "rope_theta": 1e5,
            "head_dim": 128,
        },
        biases=("qkv_bias",),
        mlp_bias=True,
        layout=Layout(interleaved=True),
    ),
}
"""More families, by ``model_type``."""
