"""Qwen 2 to 3.5, dense, as mixtures of experts and as hybrids, and MiMo.

As data: :mod:`paceline.models.families.family` says what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families.family import (
    ATTENTION_BIASES,
    ExpertKeys,
    Family,
    Gguf,
    usual,
)
from paceline.models.layer_sizes import DELTA

_NO_TOKENS: dict[str, Any] = {"context": 32768, "bos": None, "eos": None}
_QWEN = usual(sliding_window=4096, max_window_layers=28, **_NO_TOKENS)
_QWEN_MOE = {**_QWEN, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
_QWEN_HYBRID = usual(
    partial_rotary_factor=0.25,
    head_dim=256,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    **_NO_TOKENS,
)
_SHARED_EXPERT = ExpertKeys(
    "moe_intermediate_size",
    shared="shared_expert_intermediate_size",
    shared_gate=True,
    some_dense=True,
)
_HYBRID_FLAGS = {"attention.qk_norm": True, "norms.plus_one": True, "attention.gate": True}


def _qwen_hybrid(gguf: Gguf, experts: ExpertKeys | None = None, **defaults: Any) -> Family:
    return Family(
        {**_QWEN_HYBRID, **defaults},
        _HYBRID_FLAGS,
        ATTENTION_BIASES,
        partial_rotary=True,
        experts=experts,
        recurrent=DELTA,
        gguf=gguf,
    )


QWEN: Mapping[str, Family] = {
    "qwen2": Family(_QWEN, {"attention.qkv_bias": True}, slides="late", gguf=Gguf(("qwen2",))),
    "mimo": Family(_QWEN, {"attention.qkv_bias": True}, slides="late"),
    "qwen3": Family(
        {**_QWEN, "head_dim": 128},
        {"attention.qk_norm": True},
        ATTENTION_BIASES,
        slides="late",
        gguf=Gguf(("qwen3",)),
    ),
    "qwen2_moe": Family(
        {
            **_QWEN_MOE,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        {"attention.qkv_bias": True},
        slides="late",
        experts=replace(_SHARED_EXPERT, renormalise=False),
        gguf=Gguf(("qwen2moe",)),
    ),
    "qwen3_moe": Family(
        {
            **_QWEN_MOE,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "moe_intermediate_size": 768,
        },
        {"attention.qk_norm": True},
        ATTENTION_BIASES,
        slides="if_asked",
        experts=ExpertKeys("moe_intermediate_size", renormalise=False, some_dense=True),
        gguf=Gguf(("qwen3moe",), renormalises=True),
    ),
    "qwen3_next": _qwen_hybrid(
        Gguf(("qwen3next",), renormalises=True),
        replace(_SHARED_EXPERT, renormalise=True),
        num_key_value_heads=2,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        decoder_sparse_step=1,
        intermediate_size=5632,
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text"),
        _qwen_hybrid(Gguf(("qwen35",), tiled_heads=True), num_key_value_heads=4),
    ),
    **dict.fromkeys(
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        _qwen_hybrid(
            Gguf(("qwen35moe",), tiled_heads=True, renormalises=True),
            _SHARED_EXPERT,
            num_key_value_heads=2,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            intermediate_size=1,
        ),
    ),
}
"""By ``model_type``."""
