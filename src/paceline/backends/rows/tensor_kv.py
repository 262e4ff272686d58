"""Keys and values in a tensor per layer, for the backends in torch. Knows no sequences.

What a KV cache holds of a number is said here (:func:`encode`, :func:`decode`); the native kernels
do the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.models.backend import BLOCK_SIZE, KV_GROUP, Slots, head_elements
from paceline.models.config import ModelConfig

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
    """``layers`` has, per layer, ``[2, slots, kv_heads, head]``, keys at index 0, values at 1.

    It is ``[1, ...]`` where the keys are the values; a layer that reads those of another has them,
    and one without attention has an empty tensor.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        slots = num_blocks * BLOCK_SIZE
        self._own: list[tuple[int, Tensor]] = []  # size of a head, and its layer's tensor
        self.layers: list[Tensor] = []
        for layer in range(config.num_layers):
            if config.owns_kv(layer):
                dim, kv_heads, _ = config.heads_of(layer)
                shape = (config.kv_arrays, slots, kv_heads, head_elements(dim, dtype))
                held = torch.empty(shape, dtype=DTYPES[dtype], device=device)
                held[:, :BLOCK_SIZE] = 0  # absent lanes read its first slot
                self._own.append((dim, held))
                self.layers.append(held)
            elif config.has_attention(layer):
                self.layers.append(self.layers[config.attention.kv_layer(layer)])
            else:
                self.layers.append(torch.empty(0, device=device))

    def move(self, source: Slots, target: Slots) -> None:
        to, at = torch.from_numpy(target), torch.from_numpy(source)
        for _, held in self._own:
            held[:, to.to(held.device)] = held[:, at.to(held.device)]

    def fill(self, slots: Slots, value: float) -> None:
        at = torch.from_numpy(slots)
        for dim, held in self._own:
            head = encode(torch.full((dim,), value), held.dtype)
            held[:, at.to(held.device)] = head.to(held.device)
