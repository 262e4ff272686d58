"""Llama and those that follow it: Mistral's, Granite, SmolLM3, MiniCPM and more dense decoders.

As data: :mod:`paceline.models.families.family` says what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.models.families.family import (
    ATTENTION_BIASES,
    GRANITE_SCALARS,
    ExpertKeys,
    Family,
    Gguf,
    Layout,
    usual,
)

_APERTUS_NAMES = (
    (r"\.attention_layernorm\.", ".input_layernorm."),
    (r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
)
LLAMA: Mapping[str, Family] = {
    "llama": Family(
        usual(),
        biases=ATTENTION_BIASES,
        mlp_bias=True,
        gguf=Gguf(("llama", "mistral"), interleaved=True),
    ),
    "mistral": Family(
        usual(context=131072, num_key_value_heads=8, sliding_window=4096),
        slides="always",
    ),
    "ministral": Family(
        usual(context=131072, num_key_value_heads=8, sliding_window=4096),
        slides="listed",
    ),
    "ministral3": Family(
        usual(
            eps=1e-5,
            context=262144,
            num_key_value_heads=8,
            head_dim=128,
            rope_theta=1e6,
            rope_parameters={
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
        ),
        slides="always",
        grows=True,
        gguf=Gguf(("mistral3",), interleaved=True),
    ),
    "llama4_text": Family(
        usual(
            eps=1e-5,
            context=131072,
            rope_theta=5e5,
            head_dim=128,
            num_key_value_heads=8,
            num_local_experts=16,
            intermediate_size=8192,
            intermediate_size_mlp=16384,
            num_experts_per_tok=1,
            n_shared_experts=1,
            decoder_sparse_step=1,
            no_rope_layer_interval=4,
            sliding_window=8192,
            use_qk_norm=True,
            attn_temperature_tuning=True,
            attn_scale=0.1,
            floor_scale=8192,
        ),
        {
            "attention.qk_norm_last": True,
            "attention.qk_norm_bare": True,
            "attention.window_chunks": True,
        },
        ATTENTION_BIASES,
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
            traits={"weighs_inputs": True},
        ),
        layout=Layout(interleaved=True, inputs_first=True),
        gguf=Gguf(("llama4",), interleaved=True),
    ),
    "granite": Family(
        usual(),
        biases=ATTENTION_BIASES,
        mlp_bias=True,
        multipliers=GRANITE_SCALARS,
        gguf=Gguf(("granite",), interleaved=True),
    ),
    "smollm3": Family(
        usual(
            context=32768,
            bos=128000,
            eos=128001,
            num_key_value_heads=4,
            rope_theta=2e6,
            no_rope_layer_interval=4,
            tie_word_embeddings=True,
        ),
        biases=ATTENTION_BIASES,
        mlp_bias=True,
        slides="late",
        rotates="listed",
        gguf=Gguf(("smollm3",), interleaved=True),
    ),
    "arcee": Family(
        usual(eps=1e-5, context=4096, bos=128000, eos=128001, hidden_act="relu2"),
        {"mlp.gated": False},
        ATTENTION_BIASES,
        mlp_bias=True,
        gguf=Gguf(("arcee",), interleaved=True),
    ),
    "apertus": Family(
        usual(
            eps=1e-5,
            context=65536,
            hidden_act="xielu",
            rope_theta=12e6,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        {"attention.qk_norm": True, "mlp.gated": False},
        ATTENTION_BIASES,
        layout=Layout(_APERTUS_NAMES, ignored=r".*\.mlp\.act_fn\.eps"),
        gguf=Gguf(("apertus",)),
    ),
    "helium": Family(
        usual(eps=1e-8, context=4096, rope_theta=1e5, head_dim=128),
        biases=("attention.qkv_bias",),
        mlp_bias=True,
        layout=Layout(interleaved=True),
    ),
    "internlm3": Family(
        usual(eps=1e-5, context=32768, num_key_value_heads=2, head_dim=128),
        biases=ATTENTION_BIASES,
        mlp_bias=True,
        keys={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    ),
    "minicpm": Family(
        usual(tie_word_embeddings=True),
        biases=ATTENTION_BIASES,
        depth_scaled=True,
        gguf=Gguf(("minicpm",), interleaved=True),
    ),
    "seed_oss": Family(
        usual(context=524288, bos=0, num_key_value_heads=8, head_dim=128, attention_bias=True),
        biases=("attention.qkv_bias",),
        mlp_bias=True,
        switches={"attention_out_bias": ("attention.o_bias",)},
        gguf=Gguf(("seed_oss",)),
    ),
}
"""By ``model_type``."""
