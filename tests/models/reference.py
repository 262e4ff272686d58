"""Tiny random checkpoints made with transformers, and the decoder driven by hand against them."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline.backends.rows.reference import ReferenceOps
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.cache.states import States
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.decoder import Decoder
from paceline.request.span import DraftTree, Span
from tests.text.vocabularies import byte_level_json, save_tokenizer

_MADE_OF = (Path(__file__).read_text(encoding="utf-8"), torch.__version__, transformers.__version__)
STORED = Path(
    __file__, "../../../.pytest_cache/models", hashlib.sha256(repr(_MADE_OF).encode()).hexdigest()
).resolve()
"""Where the files of random models are kept for as long as what makes them stays the same."""
VOCAB = 300
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}
GEMMA = {"head_dim": 16, "tie_word_embeddings": True, "query_pre_attn_scalar": 20}
GRANITE_SCALES = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-late": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "phi3": ("Phi3", {"sliding_window": 13}),
    "phi3-long": (
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 64},
    ),
    "granite": ("Granite", {**GRANITE_SCALES, "logits_scaling": 3.0}),
    "gemma2": (
        "Gemma2",
        {
            **GEMMA,
            "sliding_window": 10,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}

LONG_TEXTS = {**YARN, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = {
    "num_hidden_layers": 4,
    "sliding_window": 10,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
}
GEMMA4 = {
    **MIXED,
    "layer_types": [SLIDING, SLIDING, FULL, FULL],
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
    },
}
LLAMA4_DENSE = {
    "head_dim": 16,
    "intermediate_size": 40,
    "intermediate_size_mlp": 112,
    "use_qk_norm": True,
    "num_local_experts": 0,
    "interleave_moe_layer_step": 0,
    "moe_layers": [],
}
OWN_HEADS = {"num_key_value_heads": 4}  # of each query head
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            **MIXED,
            "rope_parameters": {
                FULL: YARN,
                SLIDING: {"rope_type": "default", "rope_theta": YARN["rope_theta"]},
            },
        },
    ),
    "glm": ("Glm", {"head_dim": 16, "rope_parameters": PARTIAL}),
    "glm4": ("Glm4", {"head_dim": 32, "rope_parameters": PARTIAL, "attention_bias": False}),
    "exaone4": ("Exaone4", MIXED),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": [FULL, FULL]}),
    "ernie4-5": ("Ernie4_5", {"head_dim": 32, "use_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 100.0,
                "factor": 1.0,
                "alpha": 50.0,
            },
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "ministral": ("Ministral", {**MIXED, "head_dim": 16}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": LONG_TEXTS}),
    "internlm3": ("InternLM3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "minicpm": ("Granite", {**GRANITE_SCALES, "attention_multiplier": 0.25}),
    "helium": ("Helium", {"head_dim": 16}),
    "cohere": ("Cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", {**MIXED, "logit_scale": 0.5, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 11, "tie_word_embeddings": True}),
    "nemotron": ("Nemotron", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "arcee": ("Arcee", {"head_dim": 16}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "rope_parameters": PARTIAL}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True}),
    "gpt-neox": ("GPTNeoX", OWN_HEADS),
    "gpt-neox-serial": (
        "GPTNeoX",
        {**OWN_HEADS, "use_parallel_residual": False, "rope_parameters": PARTIAL},
    ),
    "gpt2": ("GPT2", {**OWN_HEADS, "n_inner": 112, "tie_word_embeddings": True}),
    "phi": ("Phi", {}),
    "apertus": ("Apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama4-dense": (
        "Llama4Text",
        {**LLAMA4_DENSE, "num_hidden_layers": 5, "attention_chunk_size": 9},
    ),
    "llama4-dense-some": (
        "Llama4Text",
        {
            **LLAMA4_DENSE,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 0, 1],
            "attention_chunk_size": 9,
            "floor_scale": 3,
            "attn_scale": 0.3,
            "attention_bias": True,
        },
    ),
    "llama4-dense-full": (
        "Llama4Text",
        {
            **LLAMA4_DENSE,
            "no_rope_layers": [1, 1],
            "layer_types": [FULL, FULL],
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": ("Gemma4Text", {**GEMMA4, "attention_k_eq_v": True, "num_key_value_heads": 4}),
    "gemma4-unified": (
        "Gemma4UnifiedText",
        {**{k: v for k, v in GEMMA4.items() if "per_layer" not in k}, "attention_k_eq_v": True},
    ),
    "gemma3n": (
        "Gemma3nText",
        {
            **MIXED,
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            "head_dim": 16,
            "intermediate_size": [112] * 5 + [144],
            "num_kv_shared_layers": 3,
            "vocab_size_per_layer_input": 290,
            "hidden_size_per_layer_input": 24,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.3, 0.0],
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                FULL: {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma4-inputs": (
        "Gemma4Text",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            "hidden_size_per_layer_input": 24,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 8.0,
        },
    ),
}
"""Dense families that leave Llama's form in more than biases."""
FAMILIES |= DENSE


def _as_minicpm(config: Any) -> dict[str, Any]:
    depth = config.num_hidden_layers**0.5
    return {
        "model_type": "minicpm",
        "scale_emb": config.embedding_multiplier,
        "scale_depth": config.residual_multiplier * depth,
        "dim_model_base": config.hidden_size / config.logits_scaling,
    }


RETOLD: dict[str, Callable[[Any], dict[str, Any]]] = {"minicpm": _as_minicpm}
"""Models that another family describes otherwise: what config.json says instead."""

MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.75,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
LLAMA4 = {"head_dim": 16, "intermediate_size": 40, "intermediate_size_mlp": 112}
LLAMA4 |= {"num_local_experts": 6, "use_qk_norm": True}
GRANITE = dict(FAMILIES["granite"][1])
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 11}),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 72}),
    "qwen2-moe-some": (
        "Qwen2Moe",
        {
            **MOE,
            "shared_expert_intermediate_size": 24,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "head_dim": 32, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {**MOE, "eos_token_id": 2}),
    "granite-moe": ("GraniteMoe", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {
            **GRANITE,
            "num_local_experts": 6,
            "num_experts_per_tok": 6,
            "shared_intermediate_size": 24,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            **ROUTED,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "glm4-moe-groups": ("Glm4Moe", {**ROUTED, "n_group": 4, "topk_group": 2}),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 96,
            "head_dim": 16,
            "sliding_window": 11,
            "num_hidden_layers": 3,
            "rope_parameters": {**YARN, "beta_fast": 4.0, "truncate": False},
        },
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "kv_lora_rank": 20, "n_shared_experts": 2},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            "rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 0.5},
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
        },
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {**LATENT, "num_hidden_layers": 2, "n_shared_experts": 1}),
    "dots1": (
        "Dots1",
        {
            **ROUTED,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "sliding_window": None,
        },
    ),
    "ernie4-5-moe": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {
            "num_experts": 5,
            "moe_topk": 2,
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 100.0,
                "factor": 1.0,
                "alpha": 50.0,
            },
        },
    ),
    "gemma4-moe": (
        "Gemma4Text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 6, "sliding_window": 11}),
    "phimoe-long": (
        "Phimoe",
        {
            "num_local_experts": 6,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [1.5 + 0.5 * i for i in range(8)],
                "short_mscale": 1.2,
                "long_mscale": 1.3,
            },
        },
    ),
    "llama4": ("Llama4Text", {**LLAMA4, "num_hidden_layers": 5}),
    "llama4-some": (
        "Llama4Text",
        {
            **LLAMA4,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 0, 1],
            "attention_chunk_size": 9,
            "floor_scale": 3,
            "attn_scale": 0.3,
            "num_experts_per_tok": 2,
            "attention_bias": True,
        },
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {**LATENT, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    ),
}
"""Families of mixtures of experts."""
LINEAR = "linear_attention"
DELTA_SIZES = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rms_norm_eps": 1e-3,  # heads of few dimensions nearly cancel at times
}
DELTA = {
    **DELTA_SIZES,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    },
}
CONVOLVED = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", FULL, "conv", "conv"],
    "conv_L_cache": 3,
}
MAMBA = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
    "rms_norm_eps": 1e-3,
}
FALCON = {
    **{key: value for key, value in MAMBA.items() if key != "layer_types"},
    "num_hidden_layers": 2,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
}
NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 10,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-3,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        {**DELTA, **MOE, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "qwen3-5": ("Qwen3_5Text", {**DELTA, "attention_bias": True}),
    "qwen3-5-moe": ("Qwen3_5MoeText", {**DELTA, **MOE, "shared_expert_intermediate_size": 24}),
    "lfm2": ("Lfm2", {**CONVOLVED, "block_multiple_of": 16, "tie_word_embeddings": True}),
    "lfm2-moe": (
        "Lfm2Moe",
        {**CONVOLVED, **MOE, "num_dense_layers": 1, "tie_word_embeddings": True},
    ),
    "falcon-h1": (
        "FalconH1",
        {
            **FALCON,
            "mlp_multipliers": [0.7, 1.3],
            "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.4,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.9,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
        },
    ),
    "falcon-h1-normed": (
        "FalconH1",
        {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    ),
    "nemotron-h": (
        "NemotronH",
        {**NEMOTRON, "layers_block_type": [LINEAR, "mlp", LINEAR, FULL, "mlp"]},
    ),
    "nemotron-h-moe": (
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": [LINEAR, "moe", FULL, "mlp", LINEAR, "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 24,
            "routed_scaling_factor": 1.75,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "num_hidden_layers": 5,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 12,
            "n_groups": 2,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "bamba": (
        "Bamba",
        {
            **{key: value for key, value in MAMBA.items() if key != "layer_types"},
            "attn_layer_indices": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "olmo-hybrid": ("OlmoHybrid", {**DELTA_SIZES, "linear_num_value_heads": 2}),
    "olmo-hybrid-rotary": (
        "OlmoHybrid",
        {
            **DELTA_SIZES,
            "layer_types": [LINEAR, FULL, FULL, LINEAR],
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {**MAMBA, **GRANITE, "num_local_experts": 0, "shared_intermediate_size": 72},
    ),
    "granite-hybrid-moe": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            **GRANITE,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
        },
    ),
}
"""Families that have recurrent layers."""


def make_model(family: str, dtype: str = "float32", **changes: Any) -> Any:
    """A random model of the family, on the reference's side."""
    name, options = {**FAMILIES, **MIXTURES, **HYBRIDS}[family]
    config = getattr(transformers, name + "Config")(**{**COMMON, **options, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    classes = {
        "Gemma3Text": "Gemma3ForCausalLM",
        "Gemma3nText": "Gemma3nForCausalLM",
        "Gemma4Text": "Gemma4ForCausalLM",
        "Gemma4UnifiedText": "Gemma4UnifiedForCausalLM",
        "InternLM3": "LlamaForCausalLM",
        "GPT2": "GPT2LMHeadModel",
        "Llama4Text": "Llama4ForCausalLM",
        "Qwen3_5Text": "Qwen3_5ForCausalLM",
        "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
    }
    model = getattr(transformers, classes.get(name, name + "ForCausalLM"))(config)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            # Norms and biases begin as constants, which hide mistakes.
            if parameter.ndim == 1 or label.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, tensor in model.state_dict().items():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(torch.randn_like(tensor) * 0.1)
            if name.endswith("layer_scalar"):
                tensor.copy_(0.8 + 0.4 * torch.rand_like(tensor))
    return model.to(getattr(torch, dtype)).eval()


def save_model(
    family: str, folder: Path, dtype: str = "float32", stacked: bool = False, **changes: Any
) -> None:
    """A folder with a model, whose files are made once for all processes unless it has ``changes``.

    Args:
        stacked: all experts of a layer are one tensor, as transformers holds them.
    """
    files = STORED / f"{family}-{dtype}{'-stacked' * stacked}"
    if changes:
        _write(make_model(family, dtype, **changes), family, folder, stacked)
    else:
        if not files.exists():
            _known(family, dtype, stacked)
        shutil.copytree(files, folder, dirs_exist_ok=True)


def saved_model(
    family: str, folder: Path, dtype: str = "float32", stacked: bool = False, **changes: Any
) -> Any:
    """As :func:`save_model`, and the model, which without ``changes`` others have as well."""
    if changes:
        model = make_model(family, dtype, **changes)
        _write(model, family, folder, stacked)
        return model
    model = _known(family, dtype, stacked)
    save_model(family, folder, dtype, stacked)
    return model


@functools.cache
def _known(family: str, dtype: str, stacked: bool) -> Any:
    """A model that many tests ask for; its files are stored, unless another process was first."""
    model = make_model(family, dtype)
    STORED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=STORED) as name, contextlib.suppress(OSError):
        folder = Path(name, "model")
        _write(model, family, folder, stacked)
        folder.rename(STORED / f"{family}-{dtype}{'-stacked' * stacked}")
    return model


def _write(model: Any, family: str, folder: Path, stacked: bool) -> None:
    model.save_pretrained(folder, save_original_format=not stacked)
    if family in RETOLD:
        edit(folder / "config.json", **RETOLD[family](model.config))


def save_folder(folder: Path) -> Path:
    """A complete model folder, tokenizer included."""
    save_model("qwen3", folder)
    save_tokenizer(folder, byte_level_json(), eos_token="<|end|>")
    return folder


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**raw, **changes}))


class Driver:
    """A loaded checkpoint, run span by span; keys and values are float32 by default."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_len: int = 128,
        ops: Any = None,
        kv_dtype: str = "float32",
        blocks: int = 32,
    ) -> None:
        self.checkpoint = checkpoint
        self._decoder = Decoder(
            checkpoint.config, checkpoint.tensors, ops or ReferenceOps("float32"), max_len
        )
        self._kv_dtype, self._blocks = kv_dtype, blocks
        self._begin()

    def _begin(self) -> None:
        config, ops = self.checkpoint.config, self._decoder.ops
        memory, states = ops.kv_memory(config, self._blocks, self._kv_dtype), None
        if config.recurrent:
            states = States(ops.state_memory(config, 4, 2, 64))
        kv = KVCache(memory, prefix_caching=False, states=states)
        self.runner = ModelRunner(self._decoder, kv)
        self.kv = self.runner.kv
        self.kv.open(0)
        self.kv.poison_free()

    def again(self) -> Driver:
        """The same decoder over keys, values and states of its own."""
        other = copy.copy(self)
        other._begin()
        return other

    @classmethod
    def of(cls, source: Path, **options: Any) -> Driver:
        return cls(load_checkpoint(source, with_tokenizer=False), **options)

    def chunk(self, tokens: Sequence[int]) -> torch.Tensor:
        """Commit ``tokens``; logits of all of them."""
        return self.run(DraftTree.chain(tokens[1:], [1.0] * len(tokens[1:]), "x"), tokens[0])

    def run(
        self,
        draft: DraftTree,
        root: int,
        path: Sequence[int] | None = None,
        certain: int = 0,
    ) -> torch.Tensor:
        """Run a root with a draft and commit ``path`` (default: all nodes); every node's logits.

        Args:
            certain: leading nodes that are committed whatever comes of the others.
        """
        assert self.kv.reserve(0, len(draft) + 1, certain)
        span = Span.tree(0, self.kv[0].length, root, draft)
        logits = self.runner.forward(self.runner.pack([span])).logits
        self.kv.commit(0, range(len(draft) + 1) if path is None else path)
        return torch.from_numpy(logits)
