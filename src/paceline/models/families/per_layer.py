"""What differs from layer to layer in a configuration of Gemma 3n or 4. Pure: reads no file.

Gemma 4's published form has the full layers' sizes under keys of their own, that of transformers 5
a list of changes by layer, ``per_layer_config``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.core.errors import ModelLoadError
from paceline.models.families.fields import Fields
from paceline.models.shapes import AltUp, Heads, LayerInputs


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
) -> tuple[Heads, ...]:
    """Per layer, its heads; the last layer is a full one. ``ModelLoadError`` for a bad number."""
    one_linear = fields.flag("attention_k_eq_v")
    usual = {"head_dim": sizes["head_dim"], "num_key_value_heads": sizes["num_kv_heads"]}
    wide = {**usual, "head_dim": fields.integer("global_head_dim", 2, 4096, sizes["head_dim"])}
    if one_linear and fields.get("num_global_key_value_heads") is not None:
        number = fields.integer("num_global_key_value_heads", 1, sizes["num_heads"])
        wide["num_key_value_heads"] = number
    told_of = fields.mapping("per_layer_config")
    changes = Fields(told_of, where="per_layer_config.")
    is_listed, found = fields.get("per_layer_config") is not None, []
    # transformers 5.24 pads the numbers of layers with zeros to one width.
    listed = {int(key): changes.mapping(key) for key in told_of if key.isdecimal()}
    for layer in range(sizes["num_layers"]):
        slides = bool(sliding) and sliding[layer]
        told = listed.get(layer, {}) if is_listed else {} if slides else wide
        own = Fields({**usual, **told}, where=f"per_layer_config.{layer}.")
        dim = own.integer("head_dim", 2, 4096)
        number = own.integer("num_key_value_heads", 1, sizes["num_heads"])
        if dim % 2 or sizes["num_heads"] % number:
            raise ModelLoadError(
                f"the model configuration says head_dim = {dim} and num_key_value_heads = {number} "
                f"of layer {layer}; the first must be even, the second divide the number of heads, "
                f"{sizes['num_heads']}"
            )
        found.append(Heads(dim, number, slides or not one_linear))
    return tuple(found)


def per_layer_from_hf(
    fields: Fields, heads: Sequence[Heads], sliding: Sequence[bool], dtype: np.dtype[Any]
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
