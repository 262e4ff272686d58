"""The draft of a target that is read from disk in every step, where none was configured: itself.

A step that reads its layers takes as long for many rows as for one, so a draft is worth far more
time than it is where all weights are in memory. A copy of the layers in fewer bits drafts about as
well as anything can, if there is memory for it. Owns when there is; imports nothing slow.
"""

from __future__ import annotations

import logging

from paceline.config import SpeculativeConfig
from paceline.memory import memory
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder

log = logging.getLogger(__name__)
DTYPE, BITS = "int4", 4.5
"""Of the copy, scales included."""
WORTH = 0.7
"""A copy that takes more than this part of the layers would read about as much as they do."""
ROOM = 0.8
"""Part of the memory that is left which it may take."""


def self_draft(decoder: Decoder, kv_bytes: int) -> SpeculativeConfig | None:
    """How a target drafts for itself; None where it is in memory, or there is no room for a copy.

    Args:
        kv_bytes: that keys and values may take beside it.
    """
    placement, shape = decoder.placement, decoder.config
    if placement is None or not placement.streamed or shape.recurrent:
        return None
    copy, (_, available) = copy_bytes(shape), memory()
    layers = placement.streamed_bytes * shape.num_layers / len(placement.streamed)
    left = 0 if available is None else available - kv_bytes
    if copy > WORTH * layers or copy > ROOM * left:
        small = copy > WORTH * layers
        why = "the layers take little more" if small else f"{left / 1e9:.2f} GB are left"
        log.info("no draft by a copy in 4 bits, which would take %.2f GB: %s", copy / 1e9, why)
        return None
    log.warning("drafts with a copy of its layers in 4 bits, %.2f GB; it is made now", copy / 1e9)
    return SpeculativeConfig(
        "self", dtype=DTYPE, num_speculative_tokens=32, max_branching=3, max_tree_nodes=128
    )


def copy_bytes(shape: ModelConfig) -> int:
    """What the copy of a dense model's layers takes."""
    ends = shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)
    return int((shape.num_weights - ends) * BITS / 8)
