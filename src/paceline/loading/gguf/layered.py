"""GGUF files of families whose layers differ, Gemma 3n's and 4's, told as a ``config.json`` would.

Pure: reads no tensor but the rotary factors. What the format leaves to its readers comes from the
family's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.families.fields import MOST_LAYERS
from paceline.models.families.rope import FULL, SLIDING

if TYPE_CHECKING:
    from paceline.loading.gguf.container import TensorInfo
    from paceline.tensors.arrays import Array

LAYERED = ("gemma4", "gemma3n")
"""Architectures of these families."""
PER_LAYER_KEYS = ("attention.head_count_kv", "feed_forward_length")
"""Keys that may have a value for each layer of theirs."""
LAYERED_TOP = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    "altup_proj.weight": "model.altup_projections.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.weight",
}
LAYERED_BLOCK = {
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
}
"""Parts of a layer by their names in a file, and where they belong in a checkpoint."""
LAYERED_PARAMETERS = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "mlp.gate.scale",
    "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
    "altup_correct_scale.weight": "altup.correct_output_scale",
}
"""The same of parameters that are no matrix's weight."""
_UNTURNED = 1e29  # what a pair's angle is divided by where it is not turned, or more
_ROPE_FACTORS = "rope_freqs.weight"


def layered_keys(
    get: Callable[..., Any],
    per_layer: Callable[[str], Any],
    layer_types: list[str] | None,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Array],
) -> dict[str, Any]:
    """What the family's configuration says beyond what all have.

    Args:
        get: a value of the architecture's metadata, by its key, and what stands for a missing one.
        per_layer: the same of keys that may have a list.
        layer_types: which layers have a sliding window.
        tensors: those in the file.
        read: unpacks one.

    Raises:
        ModelLoadError: the file does not say which layers slide, or its lists do not fit.
    """
    if layer_types is None or len(layer_types) > MOST_LAYERS:
        raise ModelLoadError("the GGUF metadata do not say which layers have a sliding window")
    full, sliding = get("attention.key_length"), get("attention.key_length_swa")
    kv_heads, widths = (_listed(per_layer(key), layer_types, key) for key in PER_LAYER_KEYS)
    sizes = {FULL: full, SLIDING: sliding if sliding is not None else full}
    embedding = tensors.get("per_layer_token_embd.weight")
    scalar = get("final_logit_softcapping")
    own = _own(get, layer_types)
    raw = any(k == FULL and f"blk.{i}.attn_v.weight" not in tensors for i, k in own)
    return {
        "head_dim": sizes[SLIDING],
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": {
            str(i): {"head_dim": sizes[kind], "num_key_value_heads": kv_heads[i]}
            for i, kind in enumerate(layer_types)
        },
        "layer_types": layer_types,
        "intermediate_size": widths,
        "attention_k_eq_v": raw,
        "num_kv_shared_layers": get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": embedding.shape[0] if embedding else 1,
        **({} if scalar is None else {"final_logit_softcapping": scalar}),
        "rope_parameters": _rope(get, full, read if _ROPE_FACTORS in tensors else None),
        "enable_moe_block": bool(get("expert_count", 0)),
        "top_k_experts": get("expert_used_count"),
        **(_streams(get, per_layer, tensors) if get("altup.num_inputs") is not None else {}),
    }


def _streams(
    get: Callable[..., Any], per_layer: Callable[[str], Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """What Gemma 3n says of its residual streams, and of gates of which few stay."""
    low_rank, key = tensors.get("blk.0.laurel_l.weight"), "activation_sparsity_scale"
    bounds = per_layer(key)
    if not isinstance(bounds, list) or not all(isinstance(each, float) for each in bounds):
        raise ModelLoadError(f"the GGUF metadata have no list of numbers {key}")
    return {
        "altup_num_inputs": get("altup.num_inputs"),
        "altup_active_idx": get("altup.active_idx", 0),
        "laurel_rank": low_rank.shape[0] if low_rank else None,
        # The file has bounds in standard deviations, -inf where all gates stay.
        "activation_sparsity_pattern": [NormalDist().cdf(each) for each in bounds],
    }


def _own(get: Callable[..., Any], layer_types: list[str]) -> list[tuple[int, str]]:
    """Layers that have keys and values of their own."""
    shared = get("attention.shared_kv_layers", 0)
    count = len(layer_types) - shared if isinstance(shared, int) else 0
    return list(enumerate(layer_types))[: max(count, 0)]


def _listed(value: Any, layer_types: list[str], key: str) -> list[Any]:
    found = value if isinstance(value, list) else [value] * len(layer_types)
    if len(found) != len(layer_types):
        raise ModelLoadError(
            f"the GGUF metadata say {key} of {len(found)} layers; there are {len(layer_types)}"
        )
    return found


def _rope(
    get: Callable[..., Any], full: Any, read: Callable[[str], Array] | None
) -> dict[str, dict[str, Any]]:
    """Both kinds of layers; the pairs of full ones that turn are those whose factor is 1."""
    found: dict[str, dict[str, Any]] = {
        SLIDING: {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 1e4)},
        FULL: {"rope_type": "default", "rope_theta": get("rope.freq_base", 1e6)},
    }
    if read is None:
        return found
    factors = read(_ROPE_FACTORS)
    turned = int((factors == 1.0).sum())
    others = factors[turned:] >= _UNTURNED
    if 2 * len(factors) != full or (factors[:turned] != 1.0).any() or not others.all():
        raise UnsupportedModelError(
            f"tensor {_ROPE_FACTORS} is of another form than the factors of Gemma 4, which are 1 "
            f"for the first pairs of a head of {full} and at least {_UNTURNED:g} for the others"
        )
    # The reader of this share rounds down; the half keeps a quotient's last bit from mattering.
    found[FULL] |= {"rope_type": "proportional", "partial_rotary_factor": (2 * turned + 0.5) / full}
    return found
