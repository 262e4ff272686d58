"""GLM, Ernie and Hunyuan, dense and as mixtures of experts.

As data: :mod:`paceline.models.families.family` says what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.models.families.family import (
    ATTENTION_BIASES,
    BIASED_EXPERTS,
    ExpertKeys,
    Family,
    Gguf,
    Layout,
    usual,
)

_GLM = usual(
    eps=1.5625e-7,
    context=131072,
    bos=None,
    eos=[151329, 151336, 151338],
    num_key_value_heads=2,
    partial_rotary_factor=0.5,
    attention_bias=True,
)
_GLM4_NAMES = (
    (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
    (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
    (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
)
_HUNYUAN_NAMES = ((r"\.query_layernorm\.", ".q_norm."), (r"\.key_layernorm\.", ".k_norm."))
GLM_ERNIE: Mapping[str, Family] = {
    "glm": Family(
        _GLM,
        biases=("attention.qkv_bias",),
        partial_rotary=True,
        layout=Layout(interleaved=True),
        gguf=Gguf(("chatglm",), interleaved=True, fused_up=True),
    ),
    "glm4": Family(
        _GLM,
        {"norms.after": True},
        ("attention.qkv_bias",),
        partial_rotary=True,
        layout=Layout(_GLM4_NAMES, interleaved=True),
        gguf=Gguf(("glm4",), interleaved=True, fused_up=True),
    ),
    "glm4_moe": Family(
        usual(
            eps=1e-5,
            context=131072,
            bos=None,
            eos=None,
            num_key_value_heads=8,
            partial_rotary_factor=0.5,
            n_routed_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
            n_shared_experts=1,
            first_k_dense_replace=1,
        ),
        biases=("attention.qkv_bias",),
        partial_rotary=True,
        experts=BIASED_EXPERTS,
        switches={"use_qk_norm": ("attention.qk_norm",)},
        gguf=Gguf(("glm4moe",)),
    ),
    "ernie4_5": Family(
        usual(
            eps=1e-5,
            context=131072,
            num_key_value_heads=2,
            rope_theta=5e5,
            head_dim=128,
            tie_word_embeddings=True,
        ),
        switches={"use_bias": (*ATTENTION_BIASES, "mlp.bias")},
        layout=Layout(interleaved=True),
        gguf=Gguf(("ernie4_5",), interleaved=True),
    ),
    "ernie4_5_moe": Family(
        usual(
            eps=1e-5,
            context=131072,
            num_key_value_heads=4,
            moe_num_experts=64,
            moe_intermediate_size=1536,
            rope_theta=5e5,
            tie_word_embeddings=True,
            moe_k=6,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_norm_min=1e-12,
        ),
        refused=("use_bias",),
        experts=ExpertKeys(
            "moe_intermediate_size",
            shared="moe_num_shared_experts",
            shared_count=True,
            some_dense=True,
            per_token="moe_k",
            traits={"choice_bias": True},
        ),
        layout=Layout(interleaved=True),
        gguf=Gguf(("ernie4_5-moe",), interleaved=True),
    ),
    "hunyuan_v1_dense": Family(
        usual(eps=1e-5),
        {"attention.qk_norm": True, "attention.qk_norm_last": True},
        ATTENTION_BIASES,
        refused=("use_cla",),
        layout=Layout(_HUNYUAN_NAMES),
        gguf=Gguf(("hunyuan-dense",)),
    ),
    "hunyuan_v1_moe": Family(
        usual(eps=1e-5, moe_topk=1, num_shared_expert=1),
        {"attention.qk_norm": True, "attention.qk_norm_last": True},
        ATTENTION_BIASES,
        refused=("use_cla",),
        experts=ExpertKeys(shared="num_shared_expert", shared_count=True, per_token="moe_topk"),
        layout=Layout(_HUNYUAN_NAMES),
        gguf=Gguf(("hunyuan-moe",)),
    ),
}
"""By ``model_type``."""
