"""Latent attention (MLA) in a Hugging Face configuration. Pure: reads no file."""

from __future__ import annotations

import math

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.families.fields import Fields
from paceline.models.shapes import Latent, RopeConfig


def latent_from_hf(fields: Fields) -> Latent:
    """
    Raises:
        ModelLoadError: a number is missing or out of bounds.
        UnsupportedModelError: its linears have biases.
    """
    if fields.flag("attention_bias"):
        raise UnsupportedModelError("latent attention with biases is not supported")
    rope_dim = fields.integer("qk_rope_head_dim", 2, 4096)
    if rope_dim % 2:
        raise ModelLoadError(
            f"the model configuration says qk_rope_head_dim = {rope_dim}; it must be even"
        )
    return Latent(
        rank=fields.integer("kv_lora_rank", 1, 1 << 17),
        q_rank=0
        if fields.get("q_lora_rank") is None
        else fields.integer("q_lora_rank", 1, 1 << 17),
        nope_dim=fields.integer("qk_nope_head_dim", 1, 4096),
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", 1, 4096),
        interleaved=fields.flag("rope_interleave"),
    )


def latent_scale(latent: Latent, rope: RopeConfig) -> float:
    """Of scores: with YaRN it grows with the length, by the square of ``mscale_all_dim``'s rule."""
    all_dims = dict(rope.params).get("mscale_all_dim", 0.0)
    assert isinstance(all_dims, float)
    grown = 0.1 * all_dims * math.log(max(rope.factor, 1.0)) + 1.0
    return float(grown**2 * (latent.nope_dim + latent.rope_dim) ** -0.5)
