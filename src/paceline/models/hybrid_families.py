"""Families that have recurrent layers. As data, like their table's first part in
:mod:`paceline.models.hf_families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.models.hf_experts import ExpertKeys
from paceline.models.hf_families import Family
from paceline.models.recurrent import DELTA

_BOTH = ("qkv_bias", "o_bias")
_QWEN: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_FLAGS = {"qk_norm": True, "norm_plus_one": True, "attention_gate": True}
_QWEN_EXPERTS = ExpertKeys(
    "moe_intermediate_size",
    shared="shared_expert_intermediate_size",
    shared_gate=True,
    some_dense=True,
)


def _qwen(experts: ExpertKeys | None = None, **defaults: Any) -> Family:
    return Family(
        {**_QWEN, **defaults},
        _QWEN_FLAGS,
        _BOTH,
        partial_rotary=True,
        experts=experts,
        recurrent=DELTA,
    )


HYBRID_FAMILIES: Mapping[str, Family] = {
    "qwen3_next": _qwen(
        ExpertKeys(
            "moe_intermediate_size",
            renormalise=True,
            shared="shared_expert_intermediate_size",
            shared_gate=True,
            some_dense=True,
        ),
        num_experts_per_tok=10,
        decoder_sparse_step=1,
        intermediate_size=5632,
    ),
    "qwen3_5": _qwen(),
    "qwen3_5_text": _qwen(),
    **dict.fromkeys(
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        # No layer is dense, so that there is no width of one.
        _qwen(_QWEN_EXPERTS, num_experts_per_tok=8, intermediate_size=1),
    ),
}
