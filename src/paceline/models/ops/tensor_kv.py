"""Keys and values in one tensor, for the backends in torch. Knows no sequences, no arithmetic."""

from __future__ import annotations

import torch

from paceline.models.config import ModelConfig
from paceline.models.ops.base import BLOCK_SIZE, Slots

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TensorKV:
    """``tensor`` is ``[layers, 2, slots, kv_heads, head_dim]``, keys at index 0, values at 1."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        slots = num_blocks * BLOCK_SIZE
        shape = (config.num_layers, 2, slots, config.num_kv_heads, config.head_dim)
        self.tensor = torch.empty(shape, dtype=DTYPES[dtype], device=device)
        self.tensor[:, :, :BLOCK_SIZE] = 0  # absent lanes read its first slot

    def move(self, source: Slots, target: Slots) -> None:
        device = self.tensor.device
        to, at = torch.from_numpy(target).to(device), torch.from_numpy(source).to(device)
        self.tensor[:, :, to] = self.tensor[:, :, at]

    def fill(self, slots: Slots, value: float) -> None:
        self.tensor[:, :, torch.from_numpy(slots).to(self.tensor.device)] = value
