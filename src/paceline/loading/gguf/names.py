"""How GGUF files name and store the tensors of each architecture, against the Hugging Face way."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.loading.gguf.keys import (
    DELTA_BLOCK,
    DELTA_HYBRIDS,
    EXPERT_BLOCK,
    FLAT,
    LATENT_BLOCK,
    LAYERED,
    LAYERED_BLOCK,
    LAYERED_PARAMETERS,
    LAYERED_TOP,
    RECURRENT_BLOCK,
    RECURRENT_PARAMETERS,
)

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "phi3": "phi3",
    "granite": "granite",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "chatglm": "glm",
    "glm4": "glm4",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5",
    "hunyuan-dense": "hunyuan_v1_dense",
    "seed_oss": "seed_oss",
    "mistral3": "ministral3",
    "minicpm": "minicpm",
    "command-r": "cohere",
    "cohere2": "cohere2",
    "starcoder2": "starcoder2",
    "nemotron": "nemotron",
    "arcee": "arcee",
    "stablelm": "stablelm",
    "gptneox": "gpt_neox",
    "gpt2": "gpt2",
    "phi2": "phi",
    "apertus": "apertus",
    "glm4moe": "glm4_moe",
    "minimax-m2": "minimax_m2",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v2",
    "dots1": "dots1",
    "ernie4_5-moe": "ernie4_5_moe",
    "hunyuan-moe": "hunyuan_v1_moe",
    "gemma4": "gemma4_text",
    "gemma3n": "gemma3n_text",
    "phimoe": "phimoe",
    "llama4": "llama4_text",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "granitehybrid": "granitemoehybrid",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "falcon-h1": "falcon_h1",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
}
"""``general.architecture`` -> Hugging Face ``model_type``."""
HEADS = {"eagle3": "llama", "dflash": "qwen3"}
"""The same for heads that draft from a target's hidden states, which are no models."""

# The rotary pairs of these are interleaved: converters make it so, or the families' own checkpoints
# are so. The others keep the two halves apart.
_INTERLEAVED = (
    *("llama", "mistral", "granite", "granitemoe", "eagle3", "smollm3", "mistral3", "minicpm"),
    *("chatglm", "glm4", "ernie4_5", "ernie4_5-moe", "command-r", "cohere2", "arcee", "llama4"),
    *("granitehybrid", "nemotron_h", "nemotron_h_moe"),
)
# Those that are turned over whole heads, even where only a part of each is rotated.
_TURNED_WHOLE = ("granitehybrid",)
# Those whose norms' weights have the one added.
_PLUS_ONE = ("gemma2", "gemma3", "nemotron", *DELTA_HYBRIDS)
_TURNED = {"attn_q": "q", "attn_k": "k", "attn_qkv": "qkv"}
_FUSED_UP = ("phi3", "chatglm", "glm4")
_NORMED_AFTER = ("gemma2", "gemma3", "gemma3n", "gemma4", "olmo2", "exaone4", "glm4")
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
class Place:
    """Where a tensor belongs and what has to be undone.

    Attributes:
        name: its Hugging Face name.
        unpermute: ``q``, ``k`` or ``qkv`` where the rows of these heads are interleaved, otherwise
            empty.
        whole_heads: they are interleaved beyond what of a head is rotated.
        minus_one: a norm's weight that is stored with the one already added.
        flat: a vector that is stored as a matrix.
        minus_row: token ids that are stored as they are, not as distances from their rows.
    """

    name: str
    unpermute: str = ""
    whole_heads: bool = False
    minus_one: bool = False
    minus_row: bool = False
    flat: bool = False


def place_of(architecture: str, stored: str) -> Place:
    """The place of a stored tensor; those that are no weights of a decoder keep their name."""
    plus_one = architecture in _PLUS_ONE
    if stored in _TOP:
        return Place(_TOP[stored], minus_one=plus_one and stored == "output_norm.weight")
    if stored == "enc.output_norm.weight" and architecture in _ENCODER_NORM:
        return Place(_ENCODER_NORM[architecture])
    if stored == "d2t":
        return Place(stored, minus_row=True)
    match = _IN_BLOCK.fullmatch(stored)
    names = _block(architecture)
    if match is None:
        return Place(stored)
    index, part, kind = match.groups()
    parameter = _PARAMETERS.get(f"{part}.{kind}" if kind else part)
    if kind == "scale" and architecture not in LAYERED:
        parameter = None  # what multiplies a weight
    if parameter is not None:  # no matrix's weight, but a parameter by itself
        return Place(f"model.layers.{int(index)}.{parameter}", flat=part in FLAT)
    if part not in names or kind in (None, "scale"):
        return Place(stored)
    return Place(
        f"model.layers.{int(index)}.{names[part]}.{kind}",
        unpermute=_TURNED.get(part, "") if architecture in _INTERLEAVED else "",
        whole_heads=architecture in _TURNED_WHOLE,
        minus_one=plus_one and part.endswith("norm") and part not in FLAT and kind == "weight",
        flat=part in FLAT,
    )


def _block(architecture: str) -> dict[str, str]:
    """Parts of a layer by their names in a file, and by those in a checkpoint."""
    names = dict(_BLOCK)
    if architecture in _NORMED_AFTER:
        names |= _POST_NORMS
    if architecture in _FUSED_UP:
        names["ffn_up"] = "mlp.gate_up_proj"
    if architecture in DELTA_HYBRIDS:
        names |= DELTA_BLOCK
    return names
