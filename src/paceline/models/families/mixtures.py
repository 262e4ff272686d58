"""Mixtures of experts that are of no other clan.

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

MIXTURES: Mapping[str, Family] = {
    "mixtral": Family(
        usual(
            eps=1e-5,
            context=131072,
            num_key_value_heads=8,
            rope_theta=1e6,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        slides="always",
        experts=ExpertKeys(),
    ),
    "olmoe": Family(
        usual(eps=1e-5, context=4096, bos=None, eos=50279, num_experts=64, num_experts_per_tok=8),
        {"attention.qk_norm": True, "attention.qk_norm_whole": True},
        ATTENTION_BIASES,
        experts=ExpertKeys(renormalise=False),
        gguf=Gguf(("olmoe",)),
    ),
    "granitemoe": Family(
        usual(num_local_experts=8, num_experts_per_tok=2),
        biases=ATTENTION_BIASES,
        multipliers=GRANITE_SCALARS,
        experts=ExpertKeys(),
        gguf=Gguf(("granitemoe",), interleaved=True),
    ),
    "granitemoeshared": Family(
        usual(num_local_experts=8, num_experts_per_tok=2),
        biases=ATTENTION_BIASES,
        multipliers=GRANITE_SCALARS,
        experts=ExpertKeys(shared="shared_intermediate_size"),
    ),
    "phimoe": Family(
        usual(
            eps=1e-5,
            context=131072,
            num_key_value_heads=8,
            num_local_experts=16,
            rope_theta=1e6,
            num_experts_per_tok=2,
            router_jitter_noise=0.01,
        ),
        {"norms.layer_norm": True, "norms.bias": True},
        ATTENTION_BIASES,
        slides="always",
        experts=ExpertKeys(jitter="router_jitter_noise"),
        switches={"lm_head_bias": ("head_bias",)},
        gguf=Gguf(("phimoe",)),
    ),
    "minimax_m2": Family(
        usual(
            context=196608,
            bos=200034,
            eos=200020,
            num_key_value_heads=8,
            head_dim=128,
            rope_theta=5e6,
            num_local_experts=256,
            num_experts_per_tok=8,
        ),
        {"attention.qk_norm": True, "attention.qk_norm_whole": True},
        partial_rotary=True,
        experts=ExpertKeys(sigmoid=True, traits={"choice_bias": True}),
        gguf=Gguf(("minimax-m2",)),
    ),
    "gpt_oss": Family(
        usual(
            eps=1e-5,
            context=131072,
            bos=None,
            eos=None,
            head_dim=64,
            num_key_value_heads=8,
            rope_theta=150000.0,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            attention_bias=True,
            sliding_window=128,
            sliding_window_pattern=2,
            num_local_experts=128,
            num_experts_per_tok=4,
        ),
        {"attention.sinks": True},
        ATTENTION_BIASES,
        slides="alternately",
        clamped=True,
        experts=ExpertKeys(traits={"biases": True}),
        layout=Layout(in_turn=True, inputs_first=True),
        gguf=Gguf(("gpt-oss",), whole_ramps=True),
    ),
}
"""By ``model_type``."""
