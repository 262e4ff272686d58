"""Linears rounded to 8 bits and packed as compressed-tensors stores them. Knows no training.

The inverse of :class:`~paceline.models.quantised.integers.PackedWeight`, for weights alone: what a
linear computes with is not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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


def is_packable(weight: torch.Tensor) -> bool:
    """Whether a weight has rows that groups divide."""
    return weight.dim() == 2 and weight.shape[1] % GROUP == 0


def packed(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a linear in 8 bits with a 16-bit scale for :data:`GROUP` inputs each.

    Args:
        name: of the linear's weight.
        weight: float32 ``[n, k]``.
    """
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(dim=2) / _LARGEST).half()
    divisor = torch.where(scale > 0, scale.float(), torch.ones(()))[..., None]
    code = (groups / divisor).round().clamp(-_LARGEST, _LARGEST).flatten(1)
    return {
        f"{name}_packed": (code + 128).to(torch.uint8).view(torch.int32),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(weight.shape),
    }
