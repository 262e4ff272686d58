"""GGUF files of hybrid models, told as a ``config.json`` would. Pure: reads no tensor.

Which layers are recurrent shows in which have a convolution. What the format leaves to its readers
comes from the families' defaults; Falcon-H1's scalars are multiplied into the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.families.fields import MOST_LAYERS

DELTA_HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
_CONVOLVED = ("lfm2", "lfm2moe")
WITHOUT_ATTENTION = ("mamba2",)
_SINGLE_PARTS = ("nemotron_h", "nemotron_h_moe", *WITHOUT_ATTENTION)
WITHOUT_ROTARY = _SINGLE_PARTS
"""Architectures of these. Their files may have rotary keys all the same."""
HYBRIDS = (*DELTA_HYBRIDS, *_CONVOLVED, *_SINGLE_PARTS, "granitehybrid", "falcon-h1")
"""Architectures of these models. Lists of theirs say 0 for layers that have nothing of the kind."""
NO_ATTENTION = {
    "attention.head_count": 1,
    "attention.head_count_kv": 1,
    "attention.key_length": 2,
    "attention.value_length": 2,
    "feed_forward_length": 1,
}
"""What stands for the zeros in files of :data:`WITHOUT_ATTENTION`, which have no feed-forwards
either."""
RECURRENT_BLOCK = {
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
}
"""Parts of a layer by their names in a file, and where they belong in a checkpoint."""
DELTA_BLOCK = {
    "ssm_in": "linear_attn.in_proj_qkvz",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
}
"""The same of what gated delta nets have under the names of other parts."""
RECURRENT_PARAMETERS = {
    "ssm_a": "linear_attn.A",
    "ssm_d": "linear_attn.D",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_norm": "post_attention_layernorm.weight",  # of Falcon-H1
}
"""The same of parameters that are no matrix's weight."""
FLAT = ("ssm_a", "ssm_d", "ssm_norm")
"""Vectors that may be stored as matrices."""


def recurrent_keys(
    get: Callable[..., Any], architecture: str, tensors: Collection[str], num_layers: int
) -> dict[str, Any]:
    """What the family's configuration says beyond what all have.

    Args:
        get: a value of the architecture's metadata, by its key, and what stands for a missing one.
        tensors: names of those in the file.

    Raises:
        ModelLoadError: the sizes of the recurrence do not fit.
        UnsupportedModelError: the attention has a sliding window.
    """
    if get("attention.sliding_window"):
        raise UnsupportedModelError(
            f"GGUF files of {architecture} with attention.sliding_window are not supported"
        )
    layers = range(min(num_layers, MOST_LAYERS))  # more are refused by whoever reads this
    single = architecture in _SINGLE_PARTS
    found: dict[str, Any] = {"layer_types": [_kind(tensors, index, single) for index in layers]}
    if architecture in _CONVOLVED:
        return {
            **found,
            "conv_L_cache": get("shortconv.l_cache"),
            "conv_bias": _any(tensors, "shortconv.conv.bias"),
            "block_auto_adjust_ff_dim": False,
        }
    if architecture in DELTA_HYBRIDS:
        return found | _delta(get)
    found |= _mamba2(get, tensors)
    if architecture == "granitehybrid":
        found |= _granite(get)
    if architecture in WITHOUT_ATTENTION:
        found["head_dim"] = found["mamba_d_head"]  # what the family means by that
    if single:
        found |= {
            "n_routed_experts": get("expert_count", 0),
            "moe_shared_expert_intermediate_size": get("expert_shared_feed_forward_length", 0),
            "moe_latent_size": get("moe_latent_size", 0),
        }
    return found


def _kind(tensors: Collection[str], layer: int, single: bool) -> str:
    """Of a layer; of models whose layers have one part, also a feed-forward."""
    p = f"blk.{layer}."
    if p + "ssm_conv1d.weight" in tensors or p + "shortconv.conv.weight" in tensors:
        return "linear_attention"
    if single and p + "ffn_gate_inp.weight" in tensors:
        return "moe"
    return "mlp" if single and p + "ffn_up.weight" in tensors else "full_attention"


def _delta(get: Callable[..., Any]) -> dict[str, Any]:
    return {
        "linear_num_value_heads": get("ssm.time_step_rank"),
        "linear_num_key_heads": get("ssm.group_count"),
        "linear_key_head_dim": get("ssm.state_size"),
        "linear_value_head_dim": _value_dim(get),
        "linear_conv_kernel_dim": get("ssm.conv_kernel"),
    }


def _mamba2(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
    return {
        "mamba_n_heads": get("ssm.time_step_rank"),
        "mamba_n_groups": get("ssm.group_count"),
        "mamba_d_state": get("ssm.state_size"),
        "mamba_d_head": _value_dim(get),
        "mamba_d_conv": get("ssm.conv_kernel"),
        "mamba_conv_bias": _any(tensors, "ssm_conv1d.bias"),
        "mamba_rms_norm": _any(tensors, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # no file says otherwise
    }


def _granite(get: Callable[..., Any]) -> dict[str, Any]:
    width = get("expert_shared_feed_forward_length", get("feed_forward_length"))
    return {
        "num_local_experts": get("expert_count", 0),
        "position_embedding_type": "rope" if get("rope.scaling.finetuned", True) else "nope",
        **({} if get("expert_count", 0) else {"shared_intermediate_size": width}),
    }


def _value_dim(get: Callable[..., Any]) -> int:
    inner, heads = get("ssm.inner_size"), get("ssm.time_step_rank")
    if type(inner) is not int or type(heads) is not int or heads < 1 or inner % heads:
        raise ModelLoadError(
            f"the GGUF metadata say ssm.inner_size = {str(inner)[:40]}; it must be a multiple of "
            f"ssm.time_step_rank = {str(heads)[:40]}"
        )
    return inner // heads


def _any(tensors: Collection[str], part: str) -> bool:
    return any(name.endswith(f".{part}") for name in tensors)
