"""How GGUF files name and store the tensors of each architecture, against the Hugging Face way."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.loading.gguf.keys import (
    DELTA_BLOCK,
    EXPERT_BLOCK,
    FLAT,
    LATENT_BLOCK,
    LAYERED_BLOCK,
    LAYERED_PARAMETERS,
    LAYERED_TOP,
    RECURRENT_BLOCK,
    RECURRENT_PARAMETERS,
)
from paceline.models.families import gguf_family
from paceline.models.families.family import Family, Layout
from paceline.models.layer_sizes import DELTA

HEADS = {"eagle3": "llama", "dflash": "qwen3"}
"""``general.architecture`` -> ``model_type`` of heads that draft from a target's hidden states."""
_INTERLEAVED_HEADS = ("eagle3",)

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.norm.weight",  # of LFM2
    "output.weight": "lm_head.weight",
    "output_norm.bias": "model.norm.bias",
    "output.bias": "lm_head.bias",
    "position_embd.weight": "model.embed_positions.weight",
    **LAYERED_TOP,
}
_ENCODER_NORM = {"eagle3": "input_norm.weight", "dflash": "hidden_norm.weight"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",  # what some call it
    "attn_norm_2": "hidden_norm",
    **EXPERT_BLOCK,
    **LATENT_BLOCK,
    **LAYERED_BLOCK,
    **RECURRENT_BLOCK,
    **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
_POST_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_BLOCK = re.compile(r"blk\.(\d{1,4})\.([\w.]+?)(?:\.(weight|bias|scale))?")
_PARAMETERS = {"attn_sinks.weight": "self_attn.sinks", **LAYERED_PARAMETERS, **RECURRENT_PARAMETERS}


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """Where a tensor belongs and what has to be undone, but for the order of its rows.

    Attributes:
        name: its Hugging Face name.
        minus_one: a norm's weight that is stored with the one already added.
        flat: a vector that is stored as a matrix.
        minus_row: token ids that are stored as they are, not as distances from their rows.
    """

    name: str
    minus_one: bool = False
    minus_row: bool = False
    flat: bool = False


def place_of(architecture: str, stored: str) -> GgufPlace:
    """The place of a stored tensor; those that are no weights of a decoder keep their name."""
    family = gguf_family(architecture)
    plus_one = bool(family.flags.get("norms.plus_one"))
    if stored in _TOP:
        return GgufPlace(_TOP[stored], minus_one=plus_one and stored == "output_norm.weight")
    if stored == "enc.output_norm.weight" and architecture in _ENCODER_NORM:
        return GgufPlace(_ENCODER_NORM[architecture])
    if stored == "d2t":
        return GgufPlace(stored, minus_row=True)
    match = _IN_BLOCK.fullmatch(stored)
    names = _block(family)
    if match is None:
        return GgufPlace(stored)
    index, part, kind = match.groups()
    parameter = _PARAMETERS.get(f"{part}.{kind}" if kind else part)
    if kind == "scale" and not family.per_layer:
        parameter = None  # what multiplies a weight
    if parameter is not None:  # no matrix's weight, but a parameter by itself
        return GgufPlace(f"model.layers.{int(index)}.{parameter}", flat=part in FLAT)
    if part not in names or kind in (None, "scale"):
        return GgufPlace(stored)
    return GgufPlace(
        f"model.layers.{int(index)}.{names[part]}.{kind}",
        minus_one=plus_one and part.endswith("norm") and part not in FLAT and kind == "weight",
        flat=part in FLAT,
    )


def layout_of(architecture: str) -> Layout:
    """How files lay out what :func:`place_of` has named."""
    gguf = gguf_family(architecture).gguf
    is_interleaved = gguf.interleaved or architecture in _INTERLEAVED_HEADS
    return Layout(interleaved=is_interleaved, turned_whole=gguf.turned_whole)


def _block(family: Family) -> dict[str, str]:
    """Parts of a layer by their names in a file, and by those in a checkpoint."""
    names = dict(_BLOCK)
    if family.flags.get("norms.after"):
        names |= _POST_NORMS
    if family.gguf.fused_up:
        names["ffn_up"] = "mlp.gate_up_proj"
    if family.recurrent == DELTA:
        names |= DELTA_BLOCK
    return names
