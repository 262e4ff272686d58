"""Latent attention (MLA) in GGUF files, told as a ``config.json`` would. Pure: reads no tensor.

The architecture ``deepseek2`` stands for DeepSeek-V2 and V3, which differ in how they route: only
V3 has a bias for the choice of experts. Files have the matrices of all heads in stacks; older ones
as checkpoints of Hugging Face's layout do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

LATENT = "deepseek2"
LATENT_BLOCK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}
"""Parts of a layer by their names in a file, and where they belong in a checkpoint."""


def latent_keys(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
    """What ``config.json`` says of the attention, and of the scores of experts."""
    rope_dim = get("rope.dimension_count", 0)
    key_dim = get("attention.key_length_mla", get("attention.key_length", 0))
    biased = any(".exp_probs_b." in name for name in tensors)
    limited = get("expert_group_count", 1) > 1
    return {
        "model_type": "deepseek_v3" if biased else "deepseek_v2",
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "kv_lora_rank": get("attention.kv_lora_rank"),
        "q_lora_rank": get("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": get("attention.value_length_mla", get("attention.value_length")),
    }


def yarn_keys(get: Callable[..., Any], is_latent: bool) -> dict[str, Any]:
    """What YaRN says of the scores' growth.

    Files of latent attention tell a tenth of it, those of others all, and these leave ``mscale`` to
    be 1.
    """
    told = get("rope.scaling.yarn_log_multiplier", 0.0)
    growth = round((10 if is_latent else 1) * told, 6)
    mscale = growth if is_latent else 1.0
    return {"mscale": mscale, "mscale_all_dim": growth} if growth else {}
