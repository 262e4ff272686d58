"""Keys and values in one tensor, for the backends in torch. Knows no sequences, no arithmetic.

What a KV cache holds of a number is said here (:func:`encode`, :func:`decode`); the native kernels
do the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.models.config import ModelConfig
from paceline.models.ops.base import BLOCK_SIZE, KV_GROUP, Slots, head_elements

Tensor = torch.Tensor
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
LARGEST_HALF = 65504.0
LEAST_SCALE = 1e-30


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements that hold heads ``[..., head_dim]`` of float32, ``[..., head_elements]``.

    ``float16`` holds what is beyond its largest number as that one. ``int8`` is codes and, after
    them, the bytes of a bfloat16 scale for each :data:`KV_GROUP` dimensions: a 127th of the
    largest size, rounded up, so that every code is in -127..127. A NaN or inf makes the scale NaN.
    """
    if dtype == torch.float16:
        bounded = x.clamp(-LARGEST_HALF, LARGEST_HALF)
        return torch.where(x.isinf(), x, bounded).to(dtype)
    if dtype != torch.int8:
        return x.to(dtype)
    head_dim = x.shape[-1]
    groups = F.pad(x, (0, -head_dim % KV_GROUP)).unflatten(-1, (-1, KV_GROUP))
    scale = groups.abs().amax(dim=-1).div_(127.0).clamp_min_(LEAST_SCALE)
    bits = (scale.view(torch.int32) + 0xFFFF) >> 16
    bits = torch.where(scale.isfinite(), bits, 0x7FC0).to(torch.int16)
    codes = torch.round(groups / bits.view(torch.bfloat16).float()[..., None]).nan_to_num_(0.0)
    codes = codes.to(torch.int8).flatten(-2)[..., :head_dim]
    return torch.cat((codes, bits.view(torch.int8)), dim=-1)


def decode(elements: Tensor, head_dim: int) -> Tensor:
    """The numbers that elements hold: float32 ``[..., head_dim]``."""
    if elements.dtype != torch.int8:
        return elements.float()
    codes = F.pad(elements[..., :head_dim].float(), (0, -head_dim % KV_GROUP))
    scale = elements[..., head_dim:].contiguous().view(torch.bfloat16).float()
    numbers: Tensor = codes.unflatten(-1, (-1, KV_GROUP)) * scale[..., None]
    return numbers.flatten(-2)[..., :head_dim].contiguous()


class TensorKV:
    """``tensor`` is ``[kv_layers, 2, slots, kv_heads, head]``, keys at index 0, values at 1.

    It is ``[kv_layers, 1, ...]`` where the keys are the values. ``layers`` has each layer's part of
    it, which is empty where a layer has no attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self._head_dim = config.head_dim
        head = head_elements(config.head_dim, dtype)
        slots = num_blocks * BLOCK_SIZE
        shape = (config.num_kv_layers, config.kv_arrays, slots, config.num_kv_heads, head)
        self.tensor = torch.empty(shape, dtype=DTYPES[dtype], device=device)
        self.tensor[:, :, :BLOCK_SIZE] = 0  # absent lanes read its first slot
        self.layers = [
            self.tensor[config.kv_layer(i)] if config.has_attention(i) else self.tensor[:0]
            for i in range(config.num_layers)
        ]

    def move(self, source: Slots, target: Slots) -> None:
        device = self.tensor.device
        to, at = torch.from_numpy(target).to(device), torch.from_numpy(source).to(device)
        self.tensor[:, :, to] = self.tensor[:, :, at]

    def fill(self, slots: Slots, value: float) -> None:
        head = encode(torch.full((self._head_dim,), value), self.tensor.dtype)
        device = self.tensor.device
        self.tensor[:, :, torch.from_numpy(slots).to(device)] = head.to(device)
