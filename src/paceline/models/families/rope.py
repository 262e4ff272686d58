"""Rotary settings of a Hugging Face configuration, old and new style. Builds no tables.

Old style has ``rope_theta`` and ``rope_scaling`` at the top; new style has ``rope_parameters``,
flat or one entry per layer type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import ModelLoadError
from paceline.models.families.fields import Fields, supported
from paceline.models.layer_sizes import GROWTH_START, QUERY_GROWTH, RopeConfig

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# What each scaling reads besides theta and factor: name -> (lowest, highest, required).
_SCALINGS: dict[str, dict[str, tuple[float, float, bool]]] = {
    "default": {},
    "linear": {},
    "dynamic": {},
    "llama3": {"low_freq_factor": (1e-6, 1e6, True), "high_freq_factor": (1e-6, 1e6, True)},
    "yarn": {
        "attention_factor": (0.0, 1e3, False),
        "beta_fast": (1e-6, 1e6, False),
        "beta_slow": (1e-6, 1e6, False),
        "mscale": (0.0, 1e3, False),
        "mscale_all_dim": (0.0, 1e3, False),
    },
    "longrope": dict.fromkeys(
        ("attention_factor", "short_mscale", "long_mscale"), (0.0, 1000.0, False)
    ),
    "proportional": {},
}
_MAX_POSITIONS = 1 << 27
_TRAINED = "original_max_position_embeddings"


def rope_from_hf(
    config: Fields,
    layer_type: str,
    head_dim: int,
    *,
    partial: bool = False,
    grows: bool = False,
    unscaled: bool = False,
) -> RopeConfig:
    """Rotary settings of the layers of one type.

    Args:
        config: the whole configuration.
        layer_type: ``full_attention`` or ``sliding_attention``.
        head_dim: size of one head.
        partial: whether the family may rotate only a part of each head.
        grows: whether its queries grow with the position where ``llama_4_scaling_beta`` says so.
        unscaled: whether only the base of entries that are not this type's own holds for it.

    Raises:
        ModelLoadError: a number is missing or out of bounds.
        UnsupportedModelError: the scaling is unknown.
    """
    raw = _parameters(config, layer_type, unscaled)
    fields = Fields(raw, {"rope_theta": 10000.0}, where="rope_parameters.")
    kind = _kind(fields)
    share = fields.number("partial_rotary_factor", 0.01, 1.0, 1.0)
    whole = kind == "proportional"  # pairs that are not turned have angles of 0
    dim = head_dim if whole else int(head_dim * share)
    if partial and config.get("rotary_dim") is not None:
        dim = config.integer("rotary_dim", 2, head_dim)
    if dim % 2 or dim == 0 or (share != 1.0 and not partial and not whole):
        raise ModelLoadError(
            f"partial_rotary_factor = {share:g} of heads of size {head_dim} is not supported here; "
            "the rotated part must be an even number of dimensions"
        )
    theta = fields.number("rope_theta", 1.01, 1e15)
    if kind == "dynamic" and fields.get("alpha"):  # Hunyuan's, which does not depend on lengths
        kind = "default"
        theta *= fields.number("alpha", 1e-3, 1e9) ** (dim / max(dim - 2, 1))
    supported("rope scaling", kind, _SCALINGS)
    params = _params(config, fields, kind, dim)
    if grows and fields.get(QUERY_GROWTH) is not None:
        params[QUERY_GROWTH] = fields.number(QUERY_GROWTH, 0.0, 1e3)
        params[_TRAINED] = float(_original_positions(config, fields))
    return RopeConfig(
        theta=theta,
        scaling=kind,
        factor=_factor(config, fields, kind),
        dim=dim,
        params=tuple(params.items()),
    )


def _kind(fields: Fields) -> str:
    kind = fields.text("rope_type") or fields.text("type") or "default"
    listed = fields.get("short_factor") is not None
    if kind == "su" or (kind == "yarn" and listed):  # former names of Phi-3's scaling
        return "longrope"
    return kind


def _parameters(config: Fields, layer_type: str, unscaled: bool) -> dict[str, Any]:
    """The rotary entries for this layer type, from whichever style, with top-level fall-backs.

    Where each layer type has entries of its own, transformers 5.24 looks for YaRN's ``truncate``
    beside the layer types, and ignores one among their entries.
    """
    # Gemma 3's sliding layers have a base of their own and never a scaling.
    own_base = layer_type == SLIDING and config.get("rope_local_base_freq") is not None
    base = config.get("rope_local_base_freq" if own_base else "rope_theta")
    entries = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    if FULL in entries or SLIDING in entries:
        own = Fields(entries, where="rope_parameters.").mapping(layer_type)
        entries = {**own, "truncate": entries.get("truncate")}
    elif own_base or (unscaled and config.says("rope_theta")):
        entries = {}
    elif unscaled:
        entries = {"rope_theta": entries.get("rope_theta")}
    outer = {"rope_theta": base, "partial_rotary_factor": config.get("partial_rotary_factor")}
    outer = {key: value for key, value in outer.items() if value is not None}
    return {**outer, **{key: value for key, value in entries.items() if value is not None}}


def _original_positions(config: Fields, fields: Fields) -> int:
    """The context length before it was extended; a value at the top of the file has priority."""
    for source in (config, fields):
        if source.get(_TRAINED) is not None:
            return source.integer(_TRAINED, 1, _MAX_POSITIONS)
    return config.integer("max_position_embeddings", 1, _MAX_POSITIONS)


def _factor(config: Fields, fields: Fields, kind: str) -> float:
    if kind == "default":
        return 1.0
    implied = None
    if kind in ("yarn", "longrope"):
        longest = config.integer("max_position_embeddings", 1, _MAX_POSITIONS)
        implied = max(1.0, longest / _original_positions(config, fields))
    elif kind == "proportional":
        implied = 1.0
    return fields.number("factor", 1e-3, 1e6, implied)


def _params(
    config: Fields, fields: Fields, kind: str, dim: int
) -> dict[str, float | tuple[float, ...]]:
    params: dict[str, float | tuple[float, ...]] = {}
    if kind == "proportional":
        share = fields.number("partial_rotary_factor", 0.01, 1.0, 1.0)
        return {"turned": float(int(share * dim // 2))}
    for name, (low, high, required) in _SCALINGS[kind].items():
        if required or fields.get(name) is not None:
            params[name] = fields.number(name, low, high)
    if kind == "yarn" and fields.get("truncate") is not None:
        params["truncate"] = float(fields.flag("truncate"))
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            params[name] = fields.numbers(name, dim // 2, 1e-6, 1e9)
    if kind == "dynamic":  # this rule alone stretches what the configuration calls the maximum
        params[_TRAINED] = config.number("max_position_embeddings", 1, _MAX_POSITIONS)
    elif kind not in ("default", "linear"):
        params[_TRAINED] = float(_original_positions(config, fields))
    return params


def still_rope_from_hf(config: Fields) -> RopeConfig | None:
    """What queries of layers without rotary grow by; None where they do not.

    Configurations say that they do by true, or by a number.
    """
    if not config.get("attn_temperature_tuning"):
        return None
    span = float(config.integer("floor_scale", 1, _MAX_POSITIONS))
    growth = config.number("attn_scale", 0.0, 1e3)
    numbers = {QUERY_GROWTH: growth, GROWTH_START: 1.0, _TRAINED: span}
    return RopeConfig(params=tuple(numbers.items()))


def extended_positions(rope: RopeConfig, positions: int) -> int:
    """The context length with YaRN, whose configurations often still state the unextended one."""
    params: Mapping[str, float | tuple[float, ...]] = dict(rope.params)
    original = params.get(_TRAINED)
    if rope.scaling != "yarn" or not isinstance(original, float):
        return positions
    return min(_MAX_POSITIONS, max(positions, int(original * rope.factor)))
