"""Dense decoders that leave Llama's form in more than biases.

As data: :mod:`paceline.models.families.family` says what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.models.families.family import (
    ATTENTION_BIASES,
    Family,
    Gguf,
    Layout,
    usual,
)

_ONLY_POST_NORMS = {"norms.before": False, "norms.after": True}
_WHOLE_NORMS = {"attention.qk_norm": True, "attention.qk_norm_whole": True}
_OLMO = usual(eps=1e-5, bos=None, eos=50279)
_LAYER_NORM_EPS = {"rms_norm_eps": "layer_norm_eps"}
BIASED_NORMS = {"norms.layer_norm": True, "norms.bias": True}
_ALL_BIASES = {"attention.qkv_bias": True, "attention.o_bias": True, "mlp.bias": True}
_PARALLEL = {"norms.layer_norm": True, "mlp.parallel": True, "norms.shared": True}
_COHERE = usual(
    eps=1e-5, context=8192, bos=5, eos=255001, logit_scale=0.0625, tie_word_embeddings=True
)
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
OTHERS: Mapping[str, Family] = {
    "phi3": Family(
        usual(eps=1e-5, context=4096, eos=32000, original_max_position_embeddings=4096),
        slides="always",
        partial_rotary=True,
        gguf=Gguf(("phi3",), fused_up=True),
    ),
    "phi": Family(
        usual(eps=1e-5, hidden_act="gelu_new", partial_rotary_factor=0.5),
        {**_PARALLEL, **_ALL_BIASES, "norms.bias": True, "mlp.gated": False, "head_bias": True},
        partial_rotary=True,
        keys=_LAYER_NORM_EPS,
        refused=("qk_layernorm",),
        layout=Layout(_PHI_NAMES),
        gguf=Gguf(("phi2",)),
    ),
    "olmo2": Family(
        _OLMO, {**_ONLY_POST_NORMS, **_WHOLE_NORMS}, ATTENTION_BIASES, gguf=Gguf(("olmo2",))
    ),
    "olmo3": Family(
        {
            **_OLMO,
            "rope_theta": 5e5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        {**_ONLY_POST_NORMS, **_WHOLE_NORMS},
        ATTENTION_BIASES,
        slides="alternately",
        unscaled_windows=True,
    ),
    "exaone4": Family(
        usual(eps=1e-5, bos=0, sliding_window=4096, sliding_window_pattern=4),
        {**_ONLY_POST_NORMS, "attention.qk_norm": True},
        slides="alternately",
        rotates="sliding",
        gguf=Gguf(("exaone4",)),
    ),
    "cohere": Family(
        {**_COHERE, "rope_theta": 5e5},
        _PARALLEL,
        ATTENTION_BIASES,
        keys=_LAYER_NORM_EPS,
        refused=("use_qk_norm",),
        logit_scale=True,
        layout=Layout(interleaved=True),
        gguf=Gguf(("command-r",), interleaved=True),
    ),
    "cohere2": Family(
        {**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4},
        _PARALLEL,
        ATTENTION_BIASES,
        slides="alternately",
        rotates="sliding",
        keys=_LAYER_NORM_EPS,
        logit_scale=True,
        layout=Layout(interleaved=True),
        gguf=Gguf(("cohere2",), interleaved=True),
    ),
    "starcoder2": Family(
        usual(
            eps=1e-5,
            context=4096,
            bos=50256,
            eos=50256,
            hidden_act="gelu_pytorch_tanh",
            num_key_value_heads=2,
            use_bias=True,
            tie_word_embeddings=True,
        ),
        {**BIASED_NORMS, "mlp.gated": False},
        slides="always",
        keys={"rms_norm_eps": "norm_epsilon"},
        switches={"use_bias": (*ATTENTION_BIASES, "mlp.bias")},
        layout=Layout(_C_NAMES),
        gguf=Gguf(("starcoder2",)),
    ),
    "nemotron": Family(
        usual(eps=1e-5, context=4096, bos=2, eos=3, hidden_act="relu2", partial_rotary_factor=0.5),
        {**BIASED_NORMS, "norms.plus_one": True, "mlp.gated": False},
        ATTENTION_BIASES,
        mlp_bias=True,
        partial_rotary=True,
        keys={"rms_norm_eps": "norm_eps"},
        gguf=Gguf(("nemotron",)),
    ),
    "stablelm": Family(
        usual(eps=1e-5, context=4096, bos=0, eos=0, partial_rotary_factor=0.25),
        BIASED_NORMS,
        partial_rotary=True,
        keys=_LAYER_NORM_EPS,
        switches={
            "use_qkv_bias": ("attention.qkv_bias",),
            "use_parallel_residual": ("mlp.parallel", "norms.shared"),
        },
        refused=("qk_layernorm",),
        gguf=Gguf(("stablelm",)),
    ),
    "gpt_neox": Family(
        usual(
            eps=1e-5,
            bos=0,
            hidden_act="gelu",
            partial_rotary_factor=0.25,
            use_parallel_residual=True,
            attention_bias=True,
        ),
        {**BIASED_NORMS, "mlp.gated": False, "mlp.bias": True},
        ATTENTION_BIASES,
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
        gguf=Gguf(("gptneox",)),
    ),
    "gpt2": Family(
        usual(
            eps=1e-5,
            context=1024,
            bos=50256,
            eos=50256,
            hidden_act="gelu_new",
            tie_word_embeddings=True,
        ),
        {**BIASED_NORMS, **_ALL_BIASES, "mlp.gated": False, "positions.learned": True},
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
        gguf=Gguf(("gpt2",)),
    ),
}
"""By ``model_type``."""
