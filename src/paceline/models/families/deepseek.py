"""DeepSeek-V2 and V3 and those that follow them: latent attention, or experts that are chosen so.

As data: :mod:`paceline.models.families.family` says what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.models.families.family import (
    ATTENTION_BIASES,
    BIASED_EXPERTS,
    ExpertKeys,
    Family,
    Gguf,
    usual,
)

_DEEPSEEK = usual(
    context=4096,
    bos=None,
    eos=None,
    head_dim=64,  # which no tensor has
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_interleave=True,
)
DEEPSEEK: Mapping[str, Family] = {
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
        gguf=Gguf(("deepseek2",)),
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
        experts=BIASED_EXPERTS,
        latent=True,
    ),
    "kimi_k2": Family(
        {**_DEEPSEEK, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
        experts=BIASED_EXPERTS,
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
        experts=BIASED_EXPERTS,
        latent=True,
    ),
    "dots1": Family(
        usual(bos=None, eos=None, max_window_layers=62, use_sliding_window=True),
        {"attention.qk_norm": True},
        ATTENTION_BIASES,
        slides="late",
        experts=replace(BIASED_EXPERTS, renormalise=False),
        gguf=Gguf(("dots1",)),
    ),
}
"""By ``model_type``."""
