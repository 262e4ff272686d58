"""Hybrids, whose layers are recurrent or attention, and Mamba-2.

As data: :mod:`paceline.models.families.family` says what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.models.families.family import (
    ATTENTION_BIASES,
    GRANITE_SCALARS,
    ExpertKeys,
    Family,
    Gguf,
    Layout,
    usual,
)
from paceline.models.layer_sizes import DELTA, MAMBA2, SHORT_CONV

_LFM2: dict[str, Any] = {
    "eps": 1e-5,
    "context": 128_000,
    "rope_theta": 1e6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}
_LFM2_KEYS = {
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embedding",
    "intermediate_size": "block_ff_dim",
    "first_k_dense_replace": "num_dense_layers",
}
_LFM2_LAYOUT = Layout(
    (
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"^model\.embedding_norm\.", "model.norm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
        (r"\.conv\.conv\.", ".linear_attn.conv1d."),
        (r"\.conv\.", ".linear_attn."),
        (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction.bias"),
        (r"\.feed_forward\.", ".mlp."),
        (r"(\.mlp\..*)\.w1\.|(\.mlp)\.w1\.", r"\1\2.gate_proj."),
        (r"(\.mlp\..*)\.w2\.|(\.mlp)\.w2\.", r"\1\2.down_proj."),
        (r"(\.mlp\..*)\.w3\.|(\.mlp)\.w3\.", r"\1\2.up_proj."),
    )
)
_NEMOTRON_LAYOUT = Layout(
    renames=(
        (r"^backbone\.", "model."),
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        (r"(\.layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
        (r"\.mixer\.(up_proj|down_proj|experts|gate)\.", r".mlp.\1."),
        (r"\.mixer\.shared_experts\.", ".mlp.shared_expert."),
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.gate.e_score_correction.bias"),
        (r"\.mixer\.", ".linear_attn."),
    )
)
_FALCON_LAYOUT = Layout(
    renames=(
        (r"\.mamba\.", ".linear_attn."),
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.", ".mlp."),
        (r"^model\.final_layernorm\.", "model.norm."),
    )
)
_MAMBA_LAYOUT = Layout(renames=((r"\.mamba\.", ".linear_attn."),))
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_SMALL_MAMBA = {**_MAMBA, "mamba_d_state": 128, "mamba_d_head": 64, "mamba_n_groups": 8}
_STATE_KEYS = {
    "rms_norm_eps": "layer_norm_epsilon",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
HYBRIDS: Mapping[str, Family] = {
    "lfm2": Family(
        usual(
            block_auto_adjust_ff_dim=True,
            block_ffn_dim_multiplier=1.0,
            block_multiple_of=256,
            **_LFM2,
        ),
        {"attention.qk_norm": True},
        keys=_LFM2_KEYS,
        layout=_LFM2_LAYOUT,
        recurrent=SHORT_CONV,
        gguf=Gguf(("lfm2",)),
    ),
    "lfm2_moe": Family(
        usual(
            first_k_dense_replace=2,
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=1792,
            **_LFM2,
        ),
        {"attention.qk_norm": True},
        experts=ExpertKeys(
            "moe_intermediate_size",
            renormalise=True,
            some_dense=True,
            sigmoid=True,
            traits={"choice_bias": True},
        ),
        keys=_LFM2_KEYS,
        layout=_LFM2_LAYOUT,
        recurrent=SHORT_CONV,
        gguf=Gguf(("lfm2moe",), renormalises=True),
    ),
    "falcon_h1": Family(
        usual(
            eps=1e-5,
            context=8192,
            num_key_value_heads=8,
            mamba_d_ssm=1024,
            mamba_rms_norm=False,
            mamba_norm_before_gate=True,
            **_MAMBA,
        ),
        refused=("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"),
        layout=_FALCON_LAYOUT,
        recurrent=MAMBA2,
        beside=True,
        gguf=Gguf(("falcon-h1",)),
    ),
    "nemotron_h": Family(
        usual(
            eps=1e-5,
            context=4096,
            hidden_act="relu2",
            head_dim=128,
            num_key_value_heads=8,
            mamba_least_step=0.001,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=7688,
            moe_shared_expert_intermediate_size=7688,
            mamba_hidden_act="silu",
            intermediate_size=21504,
            **_SMALL_MAMBA,
        ),
        {"mlp.gated": False},
        refused=("attention_bias", "mlp_bias", "moe_latent_size"),
        rotates="none",
        experts=ExpertKeys(
            "moe_intermediate_size",
            renormalise=True,
            shared="moe_shared_expert_intermediate_size",
            some_dense=True,
            switch="n_routed_experts",
            sigmoid=True,
            group_best=2,
            traits={"choice_bias": True},
        ),
        keys={
            **_STATE_KEYS,
            "hidden_act": "mlp_hidden_act",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size",
            "mamba_least_step": "time_step_min",
        },
        layout=_NEMOTRON_LAYOUT,
        recurrent=MAMBA2,
        single_parts=True,
        gguf=Gguf(("nemotron_h", "nemotron_h_moe"), interleaved=True),
    ),
    "mamba2": Family(
        usual(
            eps=1e-5,
            context=1 << 17,  # nothing says how long texts may be
            bos=0,
            num_attention_heads=1,  # there is no attention
            intermediate_size=1,  # nor a feed-forward
            **_SMALL_MAMBA,
        ),
        keys={
            **_STATE_KEYS,
            "mamba_n_heads": "num_heads",
            "mamba_d_head": "head_dim",
            "mamba_d_state": "state_size",
            "mamba_expand": "expand",
        },
        layout=_NEMOTRON_LAYOUT,
        rotates="none",
        recurrent=MAMBA2,
        single_parts=True,
        gguf=Gguf(("mamba2",)),
    ),
    "olmo_hybrid": Family(
        usual(
            context=65536,
            bos=None,
            eos=100257,
            linear_conv_kernel_dim=4,
            linear_norm_eps=1e-5,  # not the other norms'
            linear_allow_neg_eigval=True,
            rope_theta=1e4,
        ),
        {"attention.qk_norm": True, "attention.qk_norm_whole": True, "norms.by_kind": True},
        ATTENTION_BIASES,
        rotates="with_theta",
        layout=Layout(
            renames=(
                (r"\.attention_layer_norm\.", ".input_layernorm."),
                (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
                (r"\.linear_attn\.([qkvba])_proj\.", r".linear_attn.in_proj_\1."),
                (r"\.linear_attn\.g_proj\.", ".linear_attn.in_proj_z."),
                (r"\.linear_attn\.o_(proj|norm)\.", r".linear_attn.out_\1."),
                (r"\.linear_attn\.out_norm\.", ".linear_attn.norm."),
            )
        ),
        recurrent=DELTA,
    ),
    "bamba": Family(
        usual(
            eps=1e-5,
            context=262144,
            num_key_value_heads=8,
            partial_rotary_factor=0.5,
            **_MAMBA,
        ),
        biases=ATTENTION_BIASES,
        mlp_bias=True,
        partial_rotary=True,
        keys={"full_attn_idxs": "attn_layer_indices"},
        layout=_FALCON_LAYOUT,
        recurrent=MAMBA2,
    ),
    "granitemoehybrid": Family(
        usual(
            mamba_d_head=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            shared_intermediate_size=1024,
            **_MAMBA,
        ),
        biases=ATTENTION_BIASES,
        partial_rotary=True,  # of Bamba's GGUF files, which say that they are of this family
        only={"partial_rotary_factor": 1.0},  # transformers 5.24 heeds it with some scalings alone
        multipliers=GRANITE_SCALARS,
        experts=ExpertKeys(shared="shared_intermediate_size", switch="num_local_experts"),
        rotates="if_asked",
        layout=_MAMBA_LAYOUT,
        recurrent=MAMBA2,
        gguf=Gguf(("granitehybrid",), interleaved=True, turned_whole=True),
    ),
}
"""By ``model_type``."""
