"""Linears rounded to 8 bits and packed as compressed-tensors stores them. Knows no training.

The inverse of :class:`~paceline.loading.quantised.integers.PackedWeight`, for weights alone: what a
linear computes with is not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.tensors.arrays import Array, Floats, floats

GROUP = 32
"""Inputs that share a scale, as in GGUF's Q8_0."""
_LARGEST = 127

PACKED_CONFIG: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
            },
        }
    },
    "ignore": [],
}
"""The ``quantization_config`` of a checkpoint whose linears are :func:`packed`."""


def is_packable(weight: Array) -> bool:
    """Whether a weight has rows that groups divide."""
    return weight.ndim == 2 and weight.shape[1] % GROUP == 0


def packed(name: str, weight: Floats) -> dict[str, Array]:
    """A linear ``[n, k]`` in 8 bits, a 16-bit scale for :data:`GROUP` inputs: arrays by name."""
    groups = weight.reshape(len(weight), -1, GROUP)
    scale = (np.abs(groups).max(axis=2) / np.float32(_LARGEST)).astype(np.float16)
    divisor = np.where(scale > 0, floats(scale), np.float32(1.0))[..., None]
    code = np.clip(np.round(groups / divisor), -_LARGEST, _LARGEST).reshape(weight.shape)
    return {
        f"{name}_packed": (code + 128).astype(np.uint8).view(np.int32),
        f"{name}_scale": scale,
        f"{name}_shape": np.array(weight.shape, np.int64),
    }
