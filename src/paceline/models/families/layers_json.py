"""What a Hugging Face configuration says of layers of special kinds. Reads no file.

Families name the same few numbers differently: :class:`~paceline.models.families.family.ExpertKeys`
and ``Family.keys`` say how. Gemma 4's published form has the full layers' sizes under keys of their
own, that of transformers 5 a list of changes by layer, ``per_layer_config``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.families.family import ExpertKeys, Family
from paceline.models.families.fields import MOST_LAYERS, Fields, supported
from paceline.models.layer_sizes import (
    DELTA,
    MAMBA2,
    SHORT_CONV,
    AltUp,
    Experts,
    HeadSizes,
    Latent,
    LayerInputs,
    Recurrent,
    RopeConfig,
)

MOST_EXPERTS = 4096
_NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SCORES = {"softmax": False, "sigmoid": True}
_METHODS = {"greedy": False, "group_limited_greedy": True}
"""DeepSeek-V2's ways to choose -> whether groups limit them."""


def experts_from_hf(fields: Fields, keys: ExpertKeys | None, num_layers: int) -> Experts | None:
    """The mixtures of a family that has some; None where all layers are dense by choice.

    Raises:
        ModelLoadError: a number is missing or out of bounds: no experts, more chosen than there
            are, or groups that are not of one size.
        UnsupportedModelError: the scores are of an unknown kind, or it is not known what weighs
            experts.
    """
    if keys is None or not _has_experts(fields, keys):
        return None
    sparse = _sparse_layers(fields, num_layers) if keys.some_dense else (True,) * num_layers
    if not any(sparse):
        return None
    said = list(filter(fields.says, _NUMBERS)) or list(filter(fields.get, _NUMBERS))[:1]
    said = said or [_NUMBERS[0]]
    number, *others = (_same(fields, key).integer(key, 1, MOST_EXPERTS) for key in said)
    if any(other != number for other in others):
        raise fields.error(said[0], f"the same as {said[1]} = {others[0]}")
    width = _same(fields, keys.width).integer(keys.width, 1, 1 << 20)
    shared = _same(fields, keys.shared).integer(keys.shared, 0, 1 << 20, 0) if keys.shared else 0
    shared *= width if keys.shared_count else 1
    groups = _groups(fields, keys, number)
    most = number // groups["groups"] * groups["groups_per_token"]
    if keys.jitter and fields.integer(keys.per_token, 1, most) != 2:
        wanted = "2, with this family's way to weigh experts"
        raise fields.error(keys.per_token, wanted, UnsupportedModelError)
    return Experts(
        number=number,
        per_token=_same(fields, keys.per_token).integer(keys.per_token, 1, most),
        width=width,
        **_weights(fields, keys),
        shared_width=shared,
        shared_gate=keys.shared_gate and shared > 0,
        sparse_layers=() if all(sparse) else tuple(sparse),
        sigmoid=_is_sigmoid(fields, keys),
        least_sum=fields.number("moe_norm_min", 0.0, 1.0, 1e-20),
        jitter=fields.number(keys.jitter, 1e-9, 1.0) if keys.jitter else 0.0,
        **keys.traits,
        **groups,
    )


def dense_width(fields: Fields, keys: ExpertKeys | None, width: int) -> int:
    """Of the feed-forward of a layer that is no mixture; where there are no experts at all, it is
    what would be shared."""
    if keys is None or not keys.shared or keys.some_dense or _has_experts(fields, keys):
        return width
    return fields.integer(keys.shared, 1, 1 << 20)


def _has_experts(fields: Fields, keys: ExpertKeys) -> bool:
    if keys.switch in _NUMBERS:
        return fields.get(keys.switch) not in (None, 0)
    return not keys.switch or fields.flag(keys.switch)


def _same(fields: Fields, key: str) -> Fields:
    """The fields, with one value instead of a list of the same for each layer."""
    value = fields.get(key)
    if isinstance(value, list | tuple) and value and all(item == value[0] for item in value):
        return Fields({key: value[0]})
    return fields


def _is_sigmoid(fields: Fields, keys: ExpertKeys) -> bool:
    said = fields.text("scoring_func")
    return supported("scoring_func", said, _SCORES) if said else keys.sigmoid


def _groups(fields: Fields, keys: ExpertKeys, number: int) -> dict[str, Any]:
    method = fields.text("topk_method")
    if not keys.group_best or _METHODS.get(method) is False:
        return {"groups": 1, "groups_per_token": 1}
    groups = fields.integer("n_group", 1, number, 1)
    if number % groups:
        raise fields.error("n_group", f"a divisor of the number of experts, {number}")
    chosen = fields.integer("topk_group", 1, groups, 1)
    if chosen == groups:  # which limits nothing
        return {"groups": 1, "groups_per_token": 1}
    best = min(keys.group_best, number // groups)
    return {"groups": groups, "groups_per_token": chosen, "group_best": best}


def _weights(fields: Fields, keys: ExpertKeys) -> dict[str, Any]:
    """Whether the weights of the chosen experts add up to 1, and what they are multiplied with."""
    said = None if keys.renormalise is None else fields.get("norm_topk_prob")
    renormalise = keys.renormalise is not False if said is None else fields.flag("norm_topk_prob")
    scale = fields.number("routed_scaling_factor", 1e-9, 1e9, 1.0)
    # Of DeepSeek-V2, whose own code then leaves out the factor; llama.cpp's does both, and that of
    # transformers 5.24 leaves the sum as it is. No published model says both.
    if keys.scaled_or_one and renormalise and scale != 1.0:
        raise UnsupportedModelError(
            f"the model configuration says norm_topk_prob = true and routed_scaling_factor = "
            f"{scale:g}; with this family one of them alone is supported"
        )
    return {"renormalise": renormalise, "scale": scale}


def _sparse_layers(fields: Fields, num_layers: int) -> Sequence[bool]:
    if fields.get("moe_layers") is not None:
        sparse = fields.layers("moe_layers")
        return [index in sparse for index in range(num_layers)]
    step = fields.integer("decoder_sparse_step", 1, 4096, 1)
    step *= fields.integer("moe_layer_interval", 1, 4096, 1)
    frequency = fields.integer("moe_layer_freq", 1, 4096, 1)
    first = fields.integer("first_k_dense_replace", 0, 4096, 0)
    first = max(first, fields.integer("moe_layer_start_index", 0, 4096, 0))
    last = fields.integer("moe_layer_end_index", -1, 4096, -1)
    types = fields.get("layer_types")
    if isinstance(types, list | tuple) and ("moe" in types or "mlp" in types):
        return [kind == "moe" for kind in fields.by_layer("layer_types", num_layers)]
    if fields.get("mlp_layer_types") is not None:
        kinds = fields.layer_kinds("mlp_layer_types", num_layers, "dense", "sparse")
        return [kind == "sparse" for kind in kinds]
    dense = fields.layers("mlp_only_layers")
    return [
        index >= first
        and (last < 0 or index <= last)
        and index not in dense
        and (index + 1) % step == 0
        and index % frequency == 0
        for index in range(num_layers)
    ]


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
        raise fields.error("qk_rope_head_dim", "even")
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


def rounded_root(width: int, dtype: np.dtype[Any]) -> float:
    """What embeddings of a width are multiplied with, as the dtype of the weights holds it."""
    return float(np.float32(width**0.5).astype(dtype))


def with_one_width(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration that says one width of feed-forwards where it lists those of all layers."""
    widths = raw.get("intermediate_size")
    if not isinstance(widths, list | tuple) or not widths:
        return raw
    return {**raw, "intermediate_size": widths[0]}


def heads_from_hf(
    fields: Fields, sizes: Mapping[str, Any], sliding: Sequence[bool]
) -> tuple[HeadSizes, ...]:
    """Per layer, its heads; the last layer is a full one. ``ModelLoadError`` for a bad number."""
    one_linear = fields.flag("attention_k_eq_v")
    usual = {"head_dim": sizes["head_dim"], "num_key_value_heads": sizes["num_kv_heads"]}
    wide = {**usual, "head_dim": fields.integer("global_head_dim", 2, 4096, sizes["head_dim"])}
    if one_linear and fields.get("num_global_key_value_heads") is not None:
        number = fields.integer("num_global_key_value_heads", 1, sizes["num_heads"])
        wide["num_key_value_heads"] = number
    by_layer = fields.mapping("per_layer_config")
    changes = Fields(by_layer, where="per_layer_config.")
    is_listed, heads = fields.get("per_layer_config") is not None, []
    # transformers 5.24 pads the numbers of layers with zeros to one width.
    listed = {int(key): changes.mapping(key) for key in by_layer if key.isdecimal()}
    for layer in range(sizes["num_layers"]):
        slides = bool(sliding) and sliding[layer]
        changed = listed.get(layer, {}) if is_listed else {} if slides else wide
        own = Fields({**usual, **changed}, where=f"per_layer_config.{layer}.")
        dim = own.integer("head_dim", 2, 4096)
        number = own.integer("num_key_value_heads", 1, sizes["num_heads"])
        if dim % 2 or sizes["num_heads"] % number:
            raise ModelLoadError(
                f"the model configuration says head_dim = {dim} and num_key_value_heads = {number} "
                f"of layer {layer}; the first must be even, the second divide the number of heads, "
                f"{sizes['num_heads']}"
            )
        heads.append(HeadSizes(dim, number, slides or not one_linear))
    return tuple(heads)


def per_layer_from_hf(
    fields: Fields, heads: Sequence[HeadSizes], sliding: Sequence[bool], dtype: np.dtype[Any]
) -> dict[str, Any]:
    """The fields of the model configuration that say how layers differ.

    Args:
        fields: of the configuration as it is, which may list the widths of feed-forwards.
        heads, sliding: per layer; ``sliding`` is empty where none slides.
        dtype: of the weights.

    Raises:
        ModelLoadError: a number is missing or out of bounds, or layers would read the keys and
            values of layers that there are not.
    """
    count = len(heads)
    shared = fields.integer("num_kv_shared_layers", 0, count - 1, 0)
    return {
        "attention.layer_heads": ()
        if len(set(heads)) == 1 and heads[0].has_values
        else tuple(heads),
        "attention.kv_layers": _kv_layers(count, shared, sliding) if shared else (),
        "mlp.widths": _mlp_widths(fields, count, shared),
        "layer_inputs": _layer_inputs(fields, count, dtype),
        "mlp.sparsity": _sparsity(fields, count),
        "altup": _altup(fields),
    }


def _mlp_widths(fields: Fields, count: int, shared: int) -> tuple[int, ...]:
    """Per layer, as a list says it or twice as wide in the layers that share; empty: all alike."""
    key = "intermediate_size"
    if isinstance(fields.get(key), list | tuple):
        widths = fields.integers(key, count, 1, 1 << 20)
    else:
        usual = fields.integer(key, 1, 1 << 20)
        twice = shared if fields.flag("use_double_wide_mlp") else 0
        widths = (usual,) * (count - twice) + (2 * usual,) * twice
    return () if len(set(widths)) == 1 else widths


def _kv_layers(count: int, shared: int, sliding: Sequence[bool]) -> tuple[int, ...]:
    """The last layers read the keys and values of the last one of their kind before them all."""
    kinds = [bool(sliding) and sliding[layer] for layer in range(count)]
    own = range(count - shared)
    latest = {kinds[layer]: layer for layer in own}
    missing = set(kinds) - set(latest)
    if missing:
        raise ModelLoadError(
            f"the model configuration says num_kv_shared_layers = {shared}, but none of the first "
            f"{count - shared} layers is {'sliding' if True in missing else 'full'}, so the others "
            "have no keys and values to read"
        )
    return (*own, *(latest[kinds[layer]] for layer in range(count - shared, count)))


def _sparsity(fields: Fields, count: int) -> tuple[float, ...]:
    """Per layer, the share of gates that is set to 0; by default that of the first ten of many."""
    key = "activation_sparsity_pattern"
    if fields.get("altup_num_inputs") is None:
        return ()
    if fields.get(key) is None:
        first = 10 if count > 10 else 0
        return (0.95,) * first + (0.0,) * (count - first) if first else ()
    if isinstance(fields.get(key), list | tuple):
        shares = fields.numbers(key, count, 0.0, 0.999999)
    else:
        shares = (fields.number(key, 0.0, 0.999999),) * count
    return shares if any(shares) else ()


def _altup(fields: Fields) -> AltUp | None:
    """The residual streams of a family that has several."""
    if fields.get("altup_num_inputs") is None:
        return None
    streams = fields.integer("altup_num_inputs", 2, 16)
    return AltUp(
        streams,
        active=fields.integer("altup_active_idx", 0, streams - 1),
        scaled=fields.flag("altup_correct_scale"),
        rank=fields.integer("laurel_rank", 1, 1 << 16),
    )


def _layer_inputs(fields: Fields, count: int, dtype: np.dtype[Any]) -> LayerInputs | None:
    least = 0 if fields.get("altup_num_inputs") is None else 1
    width = fields.integer("hidden_size_per_layer_input", least, 1 << 16, 0)
    if not width:
        return None
    vocab = fields.integer("vocab_size_per_layer_input", 1, 1 << 24)
    return LayerInputs(width, vocab, count, rounded_root(width, dtype))


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


def recurrent_from_hf(fields: Fields, family: Family, sizes: Mapping[str, Any]) -> Recurrent | None:
    """The recurrent layers; None where the family has none, or all are attention by choice."""
    num_layers, hidden_size = sizes["num_layers"], sizes["hidden_size"]
    if not family.recurrent:
        return None
    layers = (True,) * num_layers if family.beside else _layers(fields, num_layers)
    if not any(layers):
        return None
    if family.recurrent != SHORT_CONV:
        _check_activation(fields)
    if family.recurrent == DELTA:
        return Recurrent(DELTA, layers, **_delta(fields))
    if family.recurrent == MAMBA2:
        mamba2 = _mamba2(fields, hidden_size)
        return Recurrent(MAMBA2, layers, beside=family.beside, **mamba2)
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
        full = fields.layers("full_attn_idxs")
        return tuple(index not in full for index in range(num_layers))
    if types is None:
        every = fields.integer("full_attention_interval", 1, 4096, 4)
        return tuple((index + 1) % every != 0 for index in range(num_layers))
    kinds = fields.layer_kinds("layer_types", num_layers, *_ATTENTION, *_RECURRENT, *_MLP)
    return tuple(kind in _RECURRENT for kind in kinds)


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
    _check_groups(fields, "linear_num_value_heads", heads, "linear_num_key_heads", groups)
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
    _check_groups(fields, "mamba_n_heads", heads, "mamba_n_groups", groups)
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
    scales = tuple(outer * scale for scale in inner)
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
    return tuple("mlp" if kind in _MLP else "mixer" for kind in types)


def _check_groups(fields: Fields, name: str, heads: int, of: str, groups: int) -> None:
    if heads % groups:
        raise fields.error(name, f"a multiple of {of} = {groups}")
