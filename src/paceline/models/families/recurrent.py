"""Recurrent layers in a Hugging Face configuration. Pure: reads no file.

Families that call the same numbers otherwise say so by ``Family.keys``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.families.fields import MOST_LAYERS, Fields
from paceline.models.shapes import DELTA, MAMBA2, SHORT_CONV, Recurrent

_ATTENTION = ("full_attention", "attention")
_RECURRENT = ("linear_attention", "mamba", "conv")
_MLP = ("mlp", "moe")
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of ``hybrid_override_pattern``."""
_ALIKE = {"mamba2": "mamba"}
"""Families whose layers are all of one type, which their configurations do not say."""
_MOST = 1 << 17
_PARTS = 5
"""Of what comes out of Mamba-2's first linear: gates, values, B, C and time steps."""


def recurrent_from_hf(
    fields: Fields, kind: str, num_layers: int, hidden_size: int, beside: bool = False
) -> Recurrent | None:
    """The recurrent layers of a family that has some; None where all are attention by choice."""
    layers = (True,) * num_layers if beside else _layers(fields, num_layers)
    if not any(layers):
        return None
    if kind != SHORT_CONV:
        _check_activation(fields)
    if kind == DELTA:
        return Recurrent(DELTA, layers, **_delta(fields))
    if kind == MAMBA2:
        return Recurrent(MAMBA2, layers, beside=beside, **_mamba2(fields, hidden_size))
    bias = fields.flag("conv_bias")
    return Recurrent(
        SHORT_CONV,
        layers,
        kernel=fields.integer("conv_L_cache", 2, 64),
        value_dim=hidden_size,
        conv_bias=bias,
        in_bias=bias,
        out_bias=bias,
    )


def _check_activation(fields: Fields) -> None:
    """The convolution has the feed-forwards' activation where it has no key of its own."""
    key = next(filter(fields.get, ("mamba_hidden_act", "hidden_act")), "hidden_act")
    if fields.text(key) not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"the model configuration says {key} = {fields.text(key)[:40]}, which recurrent layers "
            "use too; of theirs only silu is supported"
        )


def _layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Per layer, whether it is recurrent."""
    types = fields.get("layer_types")
    if fields.get("full_attn_idxs") is not None and types is None:
        full = fields.get("full_attn_idxs")
        if not isinstance(full, list | tuple) or any(type(index) is not int for index in full):
            raise ModelLoadError("full_attn_idxs must be a list of layers")
        return tuple(index not in full for index in range(num_layers))
    if types is None:
        every = fields.integer("full_attention_interval", 1, 4096, 4)
        return tuple((index + 1) % every != 0 for index in range(num_layers))
    if not isinstance(types, list | tuple) or len(types) != num_layers:
        raise ModelLoadError(
            f"layer_types must be a list with one entry for each of {num_layers} layers"
        )
    unknown = [each for each in types if each not in (*_ATTENTION, *_RECURRENT, *_MLP)]
    if unknown:
        raise UnsupportedModelError(
            f"layers of type {str(unknown[0])[:40]!r} are not supported; supported: "
            f"{', '.join((*_ATTENTION, *_RECURRENT))}"
        )
    return tuple(each in _RECURRENT for each in types)


def adjusted_width(fields: Fields, width: int) -> int:
    """Of a feed-forward, where LFM2's rule for it is asked for: two thirds, times a factor, and
    rounded up to a multiple."""
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    width = 2 * width // 3
    if fields.get("block_ffn_dim_multiplier") is None:
        return width
    multiple = fields.integer("block_multiple_of", 1, 1 << 16)
    width = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3) * width)
    return -(-width // multiple) * multiple


def _delta(fields: Fields) -> dict[str, Any]:
    norm_eps = fields.number("rms_norm_eps", 1e-12, 0.1)
    alike = fields.integer("num_attention_heads", 1, 4096)
    heads = fields.integer("linear_num_value_heads", 1, 4096, alike)
    groups = fields.integer("linear_num_key_heads", 1, 4096, alike)
    width = fields.integer("hidden_size", 1, _MOST)
    # Families that have no numbers of their own for these go by OLMo Hybrid's rule.
    key_dim = fields.integer("linear_key_head_dim", 1, 4096, int(0.75 * width / groups))
    _check_groups("linear_num_value_heads", heads, "linear_num_key_heads", groups)
    return {
        "kernel": fields.integer("linear_conv_kernel_dim", 2, 64),
        "heads": heads,
        "groups": groups,
        "key_dim": key_dim,
        "value_dim": fields.integer("linear_value_head_dim", 1, 4096, 2 * key_dim),
        "norm": "before_gate",
        "norm_eps": fields.number("linear_norm_eps", 1e-12, 0.1, norm_eps),
        "beta_scale": 2.0 if fields.flag("linear_allow_neg_eigval") else 1.0,
    }


def _mamba2(fields: Fields, hidden_size: int) -> dict[str, Any]:
    heads = fields.integer("mamba_n_heads", 1, 4096)
    groups = fields.integer("mamba_n_groups", 1, 4096)
    _check_groups("mamba_n_heads", heads, "mamba_n_groups", groups)
    inner = fields.integer("mamba_expand", 1, 64, 2) * hidden_size
    inner = fields.integer("mamba_d_ssm", 1, _MOST, inner)
    auto = fields.get("mamba_d_head") in (None, "auto")
    value_dim = inner // heads if auto else fields.integer("mamba_d_head", 1, 4096)
    bias = fields.flag("mamba_proj_bias")
    return {
        "kernel": fields.integer("mamba_d_conv", 2, 64),
        "heads": heads,
        "groups": groups,
        "key_dim": fields.integer("mamba_d_state", 1, 4096),
        "value_dim": value_dim,
        "conv_bias": fields.flag("mamba_conv_bias"),
        "in_bias": bias,
        "out_bias": bias,
        "norm": _NORMS[_has_norm(fields), fields.flag("mamba_norm_before_gate")],
        "least_step": _least_step(fields),
        "in_scales": _in_scales(fields),
        "out_scale": fields.number("ssm_out_multiplier", 1e-9, 1e9, 1.0),
        "norm_groups": groups,
        "norm_eps": fields.number("rms_norm_eps", 1e-12, 0.1),
    }


def _least_step(fields: Fields) -> float:
    """Bounds of time steps; a highest one is nowhere in use."""
    if fields.get("mamba_least_step") is not None:  # of a family that heeds no other key
        return fields.number("mamba_least_step", 0.0, 1e3)
    if fields.get("time_step_limit") is None:
        return 0.0
    least, most = fields.numbers("time_step_limit", 2, 0.0, math.inf)
    if most < math.inf or least == math.inf:
        raise UnsupportedModelError(
            f"the model configuration says time_step_limit = [{least:g}, {most:g}]; time steps "
            "with an upper bound are not supported"
        )
    return least


_NORMS = {
    (False, False): "none",
    (False, True): "none",
    (True, False): "after_gate",
    (True, True): "before_gate",
}


def _has_norm(fields: Fields) -> bool:
    return fields.get("mamba_rms_norm") is None or fields.flag("mamba_rms_norm")


def _in_scales(fields: Fields) -> tuple[float, ...]:
    outer = fields.number("ssm_in_multiplier", 1e-9, 1e9, 1.0)
    inner = (1.0,) * _PARTS
    if fields.get("ssm_multipliers") is not None:
        inner = fields.numbers("ssm_multipliers", _PARTS, -1e9, 1e9)
    scales = tuple(outer * each for each in inner)
    return scales if set(scales) != {1.0} else ()


def scales_from_hf(fields: Fields, head_dim: int) -> dict[str, float]:
    """Falcon-H1's scalars, as those of scores, of branches and of logits.

    What queries, keys and values read is scaled by one factor, and keys by another.
    """

    def of(key: str) -> float:
        return fields.number(key, 1e-9, 1e9, 1.0)

    gate, down = 1.0, 1.0
    if fields.get("mlp_multipliers") is not None:
        gate, down = fields.numbers("mlp_multipliers", 2, 1e-9, 1e9)
    read = of("attention_in_multiplier")
    return {
        "attention.scale": read * read * of("key_multiplier") * head_dim**-0.5,
        "multipliers.attention_out": read * of("attention_out_multiplier"),
        "multipliers.embedding": of("embedding_multiplier"),
        "multipliers.logits_divisor": 1.0 / of("lm_head_multiplier"),
        "multipliers.gate": gate,
        "multipliers.mlp_out": down,
    }


def with_layer_types(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration that lists its layers' types, where it says them by other names."""
    types, pattern = raw.get("layers_block_type"), raw.get("hybrid_override_pattern")
    same, layers = _ALIKE.get(str(raw.get("model_type"))), raw.get("num_hidden_layers")
    if same is not None and type(layers) is int and 0 < layers <= MOST_LAYERS:
        types = [same] * layers
    if isinstance(pattern, str) and types is None:
        types = [_PATTERN.get(letter, letter) for letter in pattern]
    if not isinstance(types, list) or raw.get("layer_types") is not None:
        return raw
    count = raw.get("num_hidden_layers")
    count = min(len(types), MOST_LAYERS) if count is None else count
    return {**raw, "layer_types": types, "num_hidden_layers": count}


def only_parts(fields: Fields) -> tuple[str, ...]:
    """Per layer, whether it is a mixer or a feed-forward, of types that have been checked."""
    types = fields.get("layer_types") or ()
    return tuple("mlp" if each in _MLP else "mixer" for each in types)


def _check_groups(name: str, heads: int, of: str, groups: int) -> None:
    if heads % groups:
        raise ModelLoadError(
            f"the model configuration says {name} = {heads}, which is not a multiple of "
            f"{of} = {groups}"
        )
