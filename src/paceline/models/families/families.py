"""The model families as data: what a configuration may leave out, and which flags it sets.

Knows no file and builds no configuration; :mod:`paceline.models.families.config_json` reads this
table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.models.families.experts import ExpertKeys
from paceline.models.layouts import PLAIN, Layout


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one family apart.

    Attributes:
        defaults: values of keys that its configurations may leave out.
        flags: fields of the model configuration that hold for every member, those of its parts as
            ``part.field``; so are fields everywhere below.
        biases: fields that the key ``attention_bias`` switches on.
        mlp_bias: whether the key of that name is heeded.
        slides: ``never``, ``always`` (where a window is given), ``listed`` (where a window is given
            and ``layer_types`` does not say otherwise), ``late`` (layers from
            ``max_window_layers`` on, if ``use_sliding_window``), ``if_asked`` (every layer, if
            ``use_sliding_window``), ``alternately`` (every layer but each
            ``sliding_window_pattern``-th) or ``rotated`` (those with rotary, in chunks).
        multipliers: configuration key -> model field, for Granite's scalars.
        gemma: scaled embeddings, ``query_pre_attn_scalar`` and the logits' soft-capping are heeded.
        caps_scores: whether the soft-capping of attention's scores is heeded.
        partial_rotary: whether a head may be rotated in part.
        unscaled_windows: whether a rotary scaling is that of layers without a window alone.
        grows: whether queries grow with the position where the rotary entries say so.
        clamped: whether its activation is gpt-oss's clamped SwiGLU, whatever ``hidden_act`` says.
        experts: how it describes mixtures of experts; None where it has none.
        keys: a key as most families call it -> as this one does.
        switches: a key -> the fields that it switches on.
        refused: keys that ask for what is not supported.
        only: a key, also one among the rotary entries -> its one value that is supported, which is
            that of a key that is absent.
        rotates: which layers rotate heads: ``all``, ``none``, ``if_asked`` (all where
            ``position_embedding_type`` is ``rope``, else none), ``with_theta`` (all where there is
            a base frequency), ``listed`` (``no_rope_layers`` or
            ``no_rope_layer_interval`` say which do not) or ``sliding`` (where a window is given).
        widening: ``intermediate_size`` where there is none, in hidden sizes; 0: it must be there.
        logit_scale: whether logits are multiplied with the key of that name.
        depth_scaled: whether MiniCPM's ``scale_emb``, ``scale_depth`` and ``dim_model_base`` count.
        dense_width: key of the width of feed-forwards that are no mixtures.
        layout: of its checkpoints.
        latent: whether its attention keeps one latent per token.
        per_layer: whether layers differ as Gemma 4's do: see
        :mod:`paceline.models.families.per_layer`. last_full: whether the last layer never slides,
        whatever the list says. recurrent: kind of its recurrent layers; empty where it has none.
        beside: whether all layers are recurrent and have attention too, with Falcon-H1's scalars.
        single_parts: whether a layer is a recurrence, attention or a feed-forward alone.
    """

    defaults: Mapping[str, Any]
    flags: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    mlp_bias: bool = False
    slides: str = "never"
    multipliers: Mapping[str, str] = field(default_factory=dict)
    gemma: bool = False
    caps_scores: bool = False
    partial_rotary: bool = False
    unscaled_windows: bool = False
    grows: bool = False
    clamped: bool = False
    experts: ExpertKeys | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    only: Mapping[str, Any] = field(default_factory=dict)
    rotates: str = "all"
    widening: int = 0
    logit_scale: bool = False
    depth_scaled: bool = False
    dense_width: str = "intermediate_size"
    layout: Layout = PLAIN
    latent: bool = False
    per_layer: bool = False
    last_full: bool = False
    recurrent: str = ""
    beside: bool = False
    single_parts: bool = False

    def called(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration whose keys are called as most families call them.

        The family's own name counts where both are there, as transformers reads no other.
        """
        own = {key: raw[name] for key, name in self.keys.items() if raw.get(name) is not None}
        return {**raw, **own}


_BOTH = ("attention.qkv_bias", "attention.o_bias")
_LLAMA = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA2 = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
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
GRANITE_SCALARS = {
    "embedding_multiplier": "multipliers.embedding",
    "residual_multiplier": "multipliers.residual",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "multipliers.logits_divisor",
}
_QWEN_MOE = {**_QWEN, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
_GEMMA_FLAGS = {"norms.after": True, "norms.plus_one": True}
_GEMMA3_FAMILY = Family(
    _GEMMA3, {**_GEMMA_FLAGS, "attention.qk_norm": True}, _BOTH, slides="alternately", gemma=True
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_LLAMA, biases=_BOTH, mlp_bias=True),
    "mistral": Family(
        {
            **_LLAMA,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 131072,
        },
        slides="always",
    ),
    "qwen2": Family(_QWEN, {"attention.qkv_bias": True}, slides="late"),
    "mimo": Family(_QWEN, {"attention.qkv_bias": True}, slides="late"),
    "qwen3": Family({**_QWEN, "head_dim": 128}, {"attention.qk_norm": True}, _BOTH, slides="late"),
    "phi3": Family(
        {
            **_LLAMA,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "eos_token_id": 32000,
        },
        slides="always",
        partial_rotary=True,
    ),
    "granite": Family(_LLAMA, biases=_BOTH, mlp_bias=True, multipliers=GRANITE_SCALARS),
    "mixtral": Family(
        {
            **_LLAMA,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        slides="always",
        experts=ExpertKeys(),
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
        experts=ExpertKeys(
            "moe_intermediate_size",
            renormalise=False,
            shared="shared_expert_intermediate_size",
            shared_gate=True,
            some_dense=True,
        ),
    ),
    "qwen3_moe": Family(
        {
            **_QWEN_MOE,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "moe_intermediate_size": 768,
        },
        {"attention.qk_norm": True},
        _BOTH,
        slides="if_asked",
        experts=ExpertKeys("moe_intermediate_size", renormalise=False, some_dense=True),
    ),
    "olmoe": Family(
        {
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "eos_token_id": 50279,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        {"attention.qk_norm": True, "attention.qk_norm_whole": True},
        _BOTH,
        experts=ExpertKeys(renormalise=False),
    ),
    "granitemoe": Family(
        {**_LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2},
        biases=_BOTH,
        multipliers=GRANITE_SCALARS,
        experts=ExpertKeys(),
    ),
    "granitemoeshared": Family(
        {**_LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2},
        biases=_BOTH,
        multipliers=GRANITE_SCALARS,
        experts=ExpertKeys(shared="shared_intermediate_size"),
    ),
    "gemma2": Family(
        _GEMMA2, _GEMMA_FLAGS, _BOTH, slides="alternately", gemma=True, caps_scores=True
    ),
    "gemma3_text": _GEMMA3_FAMILY,
    "gemma3": _GEMMA3_FAMILY,
    "gpt_oss": Family(
        {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        {"attention.sinks": True},
        _BOTH,
        slides="alternately",
        clamped=True,
        experts=ExpertKeys(biases=True),
    ),
}
"""Families by ``model_type``."""
