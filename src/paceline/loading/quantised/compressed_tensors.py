"""Linears as compressed-tensors stores them, in any of its formats that are read.

What a linear is follows from the types of its tensors, so that targets, ignored modules and mixed
formats need no reading of the patterns that name them. Activations are computed with as they are
elsewhere: how they were to be quantised is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from paceline.core.errors import UnsupportedModelError
from paceline.loading.quantised.floats import Block, Fp8Weight, Mxfp4Weight, Nvfp4Weight
from paceline.loading.quantised.integers import Int8Weight, PackedWeight
from paceline.loading.quantised.weight import Parts, QuantisedWeight, Scheme, as_object, block_size
from paceline.models.families.fields import supported

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
_PACKED = ("_packed", "_scale", "_zero_point", "_shape", "_g_idx", "_global_scale")
_PLAIN = ("", "_scale", "_zero_point")


def schemes(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    groups = [as_object(group) for group in as_object(config.get("config_groups")).values()]
    for form in {str(part["format"]) for part in (config, *groups) if part.get("format")}:
        supported("the compressed-tensors format", form, dict.fromkeys(_FORMATS))
    sparse = as_object(config.get("sparsity_config")).get("format") not in (None, "dense")
    if sparse or config.get("transform_config"):
        what = "compressed sparsity" if sparse else "transformed activations"
        raise UnsupportedModelError(
            f"compressed-tensors checkpoints with {what} are not supported; use another form of "
            "the model"
        )
    return (
        Scheme(".weight_packed", _weight_parts(_PACKED), _packed),
        Scheme(".weight_scale", _weight_parts(_PLAIN), partial(_plain, block=_block(groups))),
    )


def _weight_parts(ends: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(".weight" + end for end in ends)


def _block(groups: list[Mapping[str, Any]]) -> Block | None:
    """Rows and inputs of a block of 8-bit floats, where all that have blocks have the same.

    With the strategy ``group`` a block is so many inputs of one row.
    """
    sizes = set()
    for group in groups:
        weights = as_object(group.get("weights"))
        said, inputs = weights.get("block_structure"), weights.get("group_size")
        if said is not None:
            sizes.add(block_size(said, "block_structure"))
        elif weights.get("type") == "float" and weights.get("num_bits") == 8 and inputs:
            sizes.add(block_size((1, inputs), "group_size"))
    if len(sizes) > 1:
        raise UnsupportedModelError(
            f"blocks of several sizes in one checkpoint are not supported: {sorted(sizes)}"
        )
    return sizes.pop() if sizes else None


def _packed(parts: Parts) -> QuantisedWeight:
    packed, whole = ".weight_packed", ".weight_global_scale"
    if parts[packed].dtype != np.uint8:
        return PackedWeight(parts)
    if parts.has(whole):
        return Nvfp4Weight(parts, packed, whole, divides=True)
    return Mxfp4Weight(parts, packed, ".weight_scale")


def _plain(parts: Parts, block: Block | None) -> QuantisedWeight:
    if parts[".weight"].dtype == np.int8:
        zero, made_by = ".weight_zero_point", "compressed-tensors"
        return Int8Weight(parts, ".weight_scale", zero, made_by=made_by)
    return Fp8Weight(parts, ".weight_scale", block)
