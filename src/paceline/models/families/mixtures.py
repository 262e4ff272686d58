"""Families of mixtures of experts that route otherwise than by the largest logits alone, or whose
attention is latent. As data, like their table's first part in
:mod:`paceline.models.families.families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families.dense import HUNYUAN_NAMES
from paceline.models.families.experts import ExpertKeys
from paceline.models.families.families import Family
from paceline.models.layouts import Layout

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}
_BOTH = ("attention.qkv_bias", "attention.o_bias")
_DEEPSEEK = {
    **_DEFAULTS,
    "max_position_embeddings": 4096,
    "head_dim": 64,  # which no tensor has
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}
_BIASED_EXPERTS = ExpertKeys(
    "moe_intermediate_size",
    renormalise=True,
    shared="n_shared_experts",
    shared_count=True,
    some_dense=True,
    sigmoid=True,
    choice_bias=True,
    group_best=2,
)
"""As DeepSeek-V3 has them, and those that follow it."""

MIXTURE_FAMILIES: Mapping[str, Family] = {
    "glm4_moe": Family(
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        biases=("attention.qkv_bias",),
        partial_rotary=True,
        experts=_BIASED_EXPERTS,
        switches={"use_qk_norm": ("attention.qk_norm",)},
    ),
    "minimax_m2": Family(
        {
            **_DEFAULTS,
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "bos_token_id": 200034,
            "eos_token_id": 200020,
        },
        {"attention.qk_norm": True, "attention.qk_norm_whole": True},
        partial_rotary=True,
        experts=ExpertKeys(sigmoid=True, choice_bias=True),
    ),
    "deepseek_v2": Family(
        {
            **_DEEPSEEK,
            "topk_method": "greedy",
            "n_routed_experts": 64,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        },
        experts=ExpertKeys(
            "moe_intermediate_size",
            renormalise=False,
            shared="n_shared_experts",
            shared_count=True,
            some_dense=True,
            group_best=1,
            scaled_or_one=True,
        ),
        latent=True,
    ),
    "deepseek_v3": Family(
        {
            **_DEEPSEEK,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        experts=_BIASED_EXPERTS,
        latent=True,
    ),
    "kimi_k2": Family(
        {**_DEEPSEEK, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
        experts=_BIASED_EXPERTS,
        latent=True,
    ),
    "glm4_moe_lite": Family(
        {
            **_DEEPSEEK,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        experts=_BIASED_EXPERTS,
        latent=True,
    ),
    "dots1": Family(
        {
            **_DEFAULTS,
            "max_position_embeddings": 2048,
            "max_window_layers": 62,
            "use_sliding_window": True,
        },
        {"attention.qk_norm": True},
        _BOTH,
        slides="late",
        experts=replace(_BIASED_EXPERTS, renormalise=False),
    ),
    "ernie4_5_moe": Family(
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 4,
            "moe_num_experts": 64,
            "moe_intermediate_size": 1536,
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "moe_k": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_norm_min": 1e-12,
        },
        refused=("use_bias",),
        experts=ExpertKeys(
            "moe_intermediate_size",
            shared="moe_num_shared_experts",
            shared_count=True,
            some_dense=True,
            per_token="moe_k",
            choice_bias=True,
        ),
        layout=Layout(interleaved=True),
    ),
    "hunyuan_v1_moe": Family(
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "moe_topk": 1,
            "num_shared_expert": 1,
        },
        {"attention.qk_norm": True, "attention.qk_norm_last": True},
        _BOTH,
        refused=("use_cla",),
        experts=ExpertKeys(shared="num_shared_expert", shared_count=True, per_token="moe_topk"),
        layout=Layout(HUNYUAN_NAMES),
    ),
    "phimoe": Family(
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,
        },
        {"norms.layer_norm": True, "norms.bias": True},
        _BOTH,
        slides="always",
        experts=ExpertKeys(jitter="router_jitter_noise"),
        switches={"lm_head_bias": ("head_bias",)},
    ),
    "llama4_text": Family(
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
            "decoder_sparse_step": 1,
            "no_rope_layer_interval": 4,
            "sliding_window": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "floor_scale": 8192,
        },
        {
            "attention.qk_norm_last": True,
            "attention.qk_norm_bare": True,
            "attention.window_chunks": True,
        },
        _BOTH,
        slides="rotated",
        rotates="listed",
        keys={
            "sliding_window": "attention_chunk_size",
            "decoder_sparse_step": "interleave_moe_layer_step",
        },
        switches={"use_qk_norm": ("attention.qk_norm",)},
        dense_width="intermediate_size_mlp",
        experts=ExpertKeys(
            renormalise=False,
            shared="n_shared_experts",
            shared_count=True,
            some_dense=True,
            sigmoid=True,
            weighs_inputs=True,
        ),
        layout=Layout(interleaved=True),
    ),
}
"""Families by ``model_type``."""
