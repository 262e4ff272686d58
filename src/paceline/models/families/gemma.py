"""Gemma 2, 3, 3n and 4; the layers of the last two differ from one another.

As data: :mod:`paceline.models.families.family` says what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.models.families.family import (
    ATTENTION_BIASES,
    ExpertKeys,
    Family,
    Gguf,
    usual,
)
from paceline.models.families.rope import FULL, SLIDING

_GEMMA = usual(
    bos=2,
    eos=1,
    hidden_size=2304,
    intermediate_size=9216,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
)
_GEMMA2 = {
    **_GEMMA,
    "vocab_size": 256000,
    "num_hidden_layers": 26,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = {
    **_GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "final_logit_softcapping": None,
}
_GEMMA_FLAGS = {"norms.after": True, "norms.plus_one": True}
_GEMMA3_FAMILY = Family(
    _GEMMA3,
    {**_GEMMA_FLAGS, "attention.qk_norm": True},
    ATTENTION_BIASES,
    slides="alternately",
    gemma=True,
    gguf=Gguf(("gemma3",)),
)
_GEMMA4 = Family(
    {
        **_GEMMA,
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 1.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
    },
    {
        "norms.after": True,
        "attention.qk_norm": True,
        "attention.value_norm": True,
        "layer_scales": True,
    },
    ATTENTION_BIASES,
    slides="alternately",
    gemma=True,
    per_layer=True,
    last_full=True,
    experts=ExpertKeys(
        "moe_intermediate_size",
        shared="intermediate_size",
        per_token="top_k_experts",
        switch="enable_moe_block",
        traits={"own_norms": True, "own_scales": True},
    ),
    gguf=Gguf(("gemma4",)),
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
    gguf=Gguf(),
)
_GEMMA3N = Family(
    {
        **_GEMMA,
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 1.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
    },
    {"norms.after": True, "attention.qk_norm": True, "attention.value_norm": True},
    ATTENTION_BIASES,
    slides="alternately",
    gemma=True,
    per_layer=True,
    gguf=Gguf(("gemma3n",)),
)
GEMMA: Mapping[str, Family] = {
    "gemma2": Family(
        _GEMMA2,
        _GEMMA_FLAGS,
        ATTENTION_BIASES,
        slides="alternately",
        gemma=True,
        caps_scores=True,
        gguf=Gguf(("gemma2",)),
    ),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3_FAMILY),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _GEMMA3N),
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA4),
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), _UNIFIED),
}
"""By ``model_type``."""
