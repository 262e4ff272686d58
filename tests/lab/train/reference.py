"""Logits by the engine's own backend, to hold the differentiable one against."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.backends.rows.reference import ReferenceOps
from paceline.backends.rows.row_ops import AttentionBatch, AttentionGroup
from paceline.backends.rows.rows import Rows
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from tests.arrays import arrays


@torch.inference_mode()
def reference_logits(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], tokens: torch.Tensor
) -> torch.Tensor:
    """Logits ``[count, vocab]`` of one sequence ``[count]``, count a multiple of 16."""
    count = len(tokens)
    decoder = Rows(Decoder(config, arrays(tensors), ReferenceOps("float32"), count))
    shape = (config.num_layers, 2, count + 1, config.num_kv_heads, config.head_dim)
    slots, rows = torch.arange(1, count + 1), torch.arange(count)
    distance = rows[:, None] - rows[None]

    def mask(seen: torch.Tensor) -> torch.Tensor:
        return torch.zeros(count, count).masked_fill(~seen, -torch.inf)[:, None, None]

    sliding = mask((distance >= 0) & (distance < config.attention.sliding_window))
    group = AttentionGroup(rows, slots.repeat(count, 1), mask(distance >= 0), sliding)
    batch = AttentionBatch(torch.zeros(shape), slots, [group])
    return decoder.logits(decoder.hidden(tokens, rows, batch))
