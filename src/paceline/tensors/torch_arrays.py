"""Arrays of weights as tensors of torch and back, over the same memory. Imports torch."""

from __future__ import annotations

import numpy as np
import torch

from paceline.tensors.arrays import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, Array

_UNKNOWN_TO_NUMPY = (
    (BFLOAT16, torch.bfloat16, np.uint16, torch.uint16),
    (FLOAT8_E4M3, torch.float8_e4m3fn, np.uint8, torch.uint8),
    (FLOAT8_E5M2, torch.float8_e5m2, np.uint8, torch.uint8),
)
"""The type, in torch, and what carries its bits in both."""


def to_torch(array: Array) -> torch.Tensor:
    """A tensor over the array's memory; over a copy where it may not be written."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    for kind, wanted, bits, _ in _UNKNOWN_TO_NUMPY:
        if array.dtype == kind:
            return torch.from_numpy(array.view(bits)).view(wanted)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> Array:
    """An array over the tensor's memory; over a copy of it where it lies on a device."""
    for wanted, kind, _, bits in _UNKNOWN_TO_NUMPY:
        if tensor.dtype == kind:
            array: Array = tensor.detach().cpu().contiguous().view(bits).numpy().view(wanted)
            return array
    copied: Array = tensor.numpy(force=True)
    return copied
