"""How GGUF files name and store the tensors of each architecture, against the Hugging Face way."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from paceline.models.families import GGUF_ASSISTANT, gguf_family
from paceline.models.families.family import Family, Layout
from paceline.models.layer_sizes import DELTA

HEADS = {"eagle3": "llama", "dflash": "qwen3", GGUF_ASSISTANT: "gemma4_text"}
"""``general.architecture`` -> ``model_type`` of heads that draft from a target's hidden states."""
_INTERLEAVED_HEADS = ("eagle3",)
MARKOV = "markov_w1.weight"
"""What a file of DSpark has, whose architecture is DFlash's."""
SELECTOR = "selector_hidden.weight"
"""The same of DFlash 2."""
_OF_BLOCKS = {
    MARKOV: "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    SELECTOR: "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
}
"""Tensors of DSpark and DFlash 2 that belong to no layer."""


def head_of(architecture: str, stored: Container[str]) -> str:
    """The kind of head that a file of an architecture of :data:`HEADS` has.

    Args:
        stored: the names of its tensors.
    """
    if architecture == "dflash" and MARKOV in stored:
        return "dspark"
    if architecture == "dflash" and SELECTOR in stored:
        return "dflash2"
    return architecture.replace("-", "_")


_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.norm.weight",  # of LFM2
    "output.weight": "lm_head.weight",
    "output_norm.bias": "model.norm.bias",
    "output.bias": "lm_head.bias",
    "position_embd.weight": "model.embed_positions.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    "altup_proj.weight": "model.altup_projections.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.weight",
    "nextn.pre_projection.weight": "pre_projection.weight",  # of assistants
    "nextn.post_projection.weight": "post_projection.weight",
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
    # Of mixtures of experts:
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    # Of latent attention:
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    # Of Gemma 3n and 4:
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    # Of DFlash 2:
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
    # Of recurrent layers:
    "shortconv.in_proj": "linear_attn.in_proj",
    "shortconv.conv": "linear_attn.conv1d",
    "shortconv.out_proj": "linear_attn.out_proj",
    "ssm_in": "linear_attn.in_proj",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    # Of a layer for multi-token prediction:
    **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
"""Parts of a layer by their names in a file, and where they belong in a checkpoint."""
_DELTA_BLOCK = {
    "ssm_in": "linear_attn.in_proj_qkvz",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
}
"""What gated delta nets have under the names of other parts."""
_POST_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_BLOCK = re.compile(r"blk\.(\d{1,4})\.([\w.]+?)(?:\.(weight|bias|scale))?")
_PARAMETERS = {
    "attn_sinks.weight": "self_attn.sinks",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "mlp.gate.scale",
    "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "attn_conv_base": "attention_conv.base_kernel",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ssm_a": "linear_attn.A",
    "ssm_d": "linear_attn.D",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_norm": "post_attention_layernorm.weight",  # of Falcon-H1
}
"""The same of parameters that are no matrix's weight."""
_FLAT = ("ssm_a", "ssm_d", "ssm_norm")
"""Vectors that may be stored as matrices."""


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
    if architecture == "dflash" and stored in _OF_BLOCKS:
        return GgufPlace(_OF_BLOCKS[stored])
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
        return GgufPlace(f"model.layers.{int(index)}.{parameter}", flat=part in _FLAT)
    if part not in names or kind in (None, "scale"):
        return GgufPlace(stored)
    return GgufPlace(
        f"model.layers.{int(index)}.{names[part]}.{kind}",
        minus_one=plus_one and part.endswith("norm") and part not in _FLAT and kind == "weight",
        flat=part in _FLAT,
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
        names |= _DELTA_BLOCK
    return names
