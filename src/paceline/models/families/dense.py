"""Families of dense decoders that leave Llama's form in more than biases, as data.

Continues the table of :mod:`paceline.models.families.families`, which says what its fields mean.
Knows no file and builds no configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.models.families.families import Family
from paceline.models.layouts import Layout

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BOTH = ("attention.qkv_bias", "attention.o_bias")
_ONLY_POST_NORMS = {"norms.before": False, "norms.after": True}
_WHOLE_NORMS = {"attention.qk_norm": True, "attention.qk_norm_whole": True}
_OLMO = {**_DEFAULTS, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}
_GLM = {
    **_DEFAULTS,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
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
_LAYER_NORM_EPS = {"rms_norm_eps": "layer_norm_eps"}
_BIASED_NORMS = {"norms.layer_norm": True, "norms.bias": True}
_ALL_BIASES = {"attention.qkv_bias": True, "attention.o_bias": True, "mlp.bias": True}
_PARALLEL = {"norms.layer_norm": True, "mlp.parallel": True, "norms.shared": True}
_COHERE = {
    **_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
_C_NAMES = ((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj."))
_GPT2_NAMES = (
    (r"^(transformer\.)?wte\.", "model.embed_tokens."),
    (r"^(transformer\.)?wpe\.", "model.embed_positions."),
    (r"^(transformer\.)?ln_f\.", "model.norm."),
    (r"^(transformer\.)?h\.", "model.layers."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    *_C_NAMES,
)
_NEOX_NAMES = (
    (r"^gpt_neox\.", "model."),
    (r"^model\.embed_in\.", "model.embed_tokens."),
    (r"^model\.final_layer_norm\.", "model.norm."),
    (r"^embed_out\.", "lm_head."),
    (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
)
_PHI_NAMES = (
    (r"\.final_layernorm\.", ".norm."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.fc1\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
)
_APERTUS_NAMES = (
    (r"\.attention_layernorm\.", ".input_layernorm."),
    (r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
)

DENSE_FAMILIES: Mapping[str, Family] = {
    "smollm3": Family(
        {
            **_DEFAULTS,
            "num_key_value_heads": 4,
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
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        {**_ONLY_POST_NORMS, **_WHOLE_NORMS},
        _BOTH,
        slides="alternately",
        unscaled_windows=True,
    ),
    "glm": Family(
        _GLM, biases=("attention.qkv_bias",), partial_rotary=True, layout=Layout(interleaved=True)
    ),
    "glm4": Family(
        _GLM,
        {"norms.after": True},
        ("attention.qkv_bias",),
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
        {**_ONLY_POST_NORMS, "attention.qk_norm": True},
        slides="alternately",
        rotates="sliding",
    ),
    "ernie4_5": Family(
        {
            **_DEFAULTS,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        switches={"use_bias": (*_BOTH, "mlp.bias")},
        layout=Layout(interleaved=True),
    ),
    "hunyuan_v1_dense": Family(
        {**_DEFAULTS, "rms_norm_eps": 1e-5},
        {"attention.qk_norm": True, "attention.qk_norm_last": True},
        _BOTH,
        refused=("use_cla",),
        layout=Layout(HUNYUAN_NAMES),
    ),
    "seed_oss": Family(
        {
            **_DEFAULTS,
            "num_key_value_heads": 8,
            "max_position_embeddings": 524288,
            "head_dim": 128,
            "attention_bias": True,
            "bos_token_id": 0,
        },
        biases=("attention.qkv_bias",),
        mlp_bias=True,
        switches={"attention_out_bias": ("attention.o_bias",)},
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
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16384,
            },
        },
        slides="always",
        grows=True,
    ),
    "internlm3": Family(
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "head_dim": 128,
        },
        biases=_BOTH,
        mlp_bias=True,
        keys={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    ),
    "minicpm": Family(
        {**_DEFAULTS, "tie_word_embeddings": True},
        biases=_BOTH,
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
        biases=("attention.qkv_bias",),
        mlp_bias=True,
        layout=Layout(interleaved=True),
    ),
    "cohere": Family(
        {**_COHERE, "rope_theta": 5e5},
        _PARALLEL,
        _BOTH,
        keys=_LAYER_NORM_EPS,
        refused=("use_qk_norm",),
        logit_scale=True,
        layout=Layout(interleaved=True),
    ),
    "cohere2": Family(
        {**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4},
        _PARALLEL,
        _BOTH,
        slides="alternately",
        rotates="sliding",
        keys=_LAYER_NORM_EPS,
        logit_scale=True,
        layout=Layout(interleaved=True),
    ),
    "starcoder2": Family(
        {
            **_DEFAULTS,
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "use_bias": True,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        {**_BIASED_NORMS, "mlp.gated": False},
        slides="always",
        keys={"rms_norm_eps": "norm_epsilon"},
        switches={"use_bias": (*_BOTH, "mlp.bias")},
        layout=Layout(_C_NAMES),
    ),
    "nemotron": Family(
        {
            **_DEFAULTS,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
        {**_BIASED_NORMS, "norms.plus_one": True, "mlp.gated": False},
        _BOTH,
        mlp_bias=True,
        partial_rotary=True,
        keys={"rms_norm_eps": "norm_eps"},
    ),
    "arcee": Family(
        {
            **_DEFAULTS,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        {"mlp.gated": False},
        _BOTH,
        mlp_bias=True,
    ),
    "stablelm": Family(
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        _BIASED_NORMS,
        partial_rotary=True,
        keys=_LAYER_NORM_EPS,
        switches={
            "use_qkv_bias": ("attention.qkv_bias",),
            "use_parallel_residual": ("mlp.parallel", "norms.shared"),
        },
        refused=("qk_layernorm",),
    ),
    "gpt_neox": Family(
        {
            **_DEFAULTS,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
            "attention_bias": True,
            "bos_token_id": 0,
        },
        {**_BIASED_NORMS, "mlp.gated": False, "mlp.bias": True},
        _BOTH,
        partial_rotary=True,
        keys={
            **_LAYER_NORM_EPS,
            "partial_rotary_factor": "rotary_pct",
            "rope_theta": "rotary_emb_base",
        },
        switches={"use_parallel_residual": ("mlp.parallel",)},
        layout=Layout(
            _NEOX_NAMES,
            ignored=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
            by_head=True,
        ),
    ),
    "gpt2": Family(
        {
            **_DEFAULTS,
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        {**_BIASED_NORMS, **_ALL_BIASES, "mlp.gated": False, "positions.learned": True},
        keys={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        rotates="none",
        widening=4,
        only={"scale_attn_weights": True},
        refused=("add_cross_attention", "scale_attn_by_inverse_layer_idx"),
        layout=Layout(_GPT2_NAMES, ignored=r".*\.attn\.(bias|masked_bias)", transposed=True),
    ),
    "phi": Family(
        {
            **_DEFAULTS,
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        {**_PARALLEL, **_ALL_BIASES, "norms.bias": True, "mlp.gated": False, "head_bias": True},
        partial_rotary=True,
        keys=_LAYER_NORM_EPS,
        refused=("qk_layernorm",),
        layout=Layout(_PHI_NAMES),
    ),
    "apertus": Family(
        {
            **_DEFAULTS,
            "hidden_act": "xielu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 65536,
            "rope_theta": 12e6,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        {"attention.qk_norm": True, "mlp.gated": False},
        _BOTH,
        layout=Layout(_APERTUS_NAMES, ignored=r".*\.mlp\.act_fn\.eps"),
    ),
}
"""More families, by ``model_type``."""
