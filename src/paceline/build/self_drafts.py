"""The draft of a target that is read from disk in every step, where none was configured: itself.

A step that reads its layers takes as long for many rows as for one, so a draft is worth far more
time than it is where all weights are in memory. A copy of the layers in fewer bits drafts about as
well as anything can, if there is memory for it. Owns when there is, and in how many bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.backends.native.packing import FORMAT_OF, WEIGHT_BITS
from paceline.cache.memory_needs import DEFAULT_MEMORY_SHARE, LEAST_NODES
from paceline.config.speculative import SelfDraftConfig
from paceline.core.errors import ConfigError
from paceline.core.memory import memory
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.tensors.blocks import FORMATS
from paceline.tensors.placement import Placement

log = logging.getLogger(__name__)
COPIES = ("int4", "int3")
"""Precisions of a copy, the best first."""
WORTH = 0.7
"""A copy that takes more than this part of the layers would read about as much as they do."""
ROOM = 0.8
"""Part of the memory that is left which it may take."""
GAIN = 2.0
"""Tokens of a step that such a draft brings at least, so that this many times as much may be
read in each."""


def self_draft(decoder: Decoder, kv_bytes: int) -> SelfDraftConfig | None:
    """How a target drafts for itself; None where it is in memory, or a copy has no room."""
    placement, shape = decoder.placement, decoder.config
    if placement is None or not placement.streamed:
        return None
    _, available = memory()
    left = 0 if available is None else available - kv_bytes
    layers = placement.streamed_bytes * shape.num_layers / len(placement.streamed)
    for dtype in COPIES:
        copy, bits = copy_bytes(shape, dtype), dtype.removeprefix("int")
        if copy <= WORTH * layers and copy <= ROOM * left:
            log.warning("drafts with a copy of its layers in %s bits, %.2f GB", bits, copy / 1e9)
            if shape.recurrent:  # whose logs have room for a chain, and no more
                return SelfDraftConfig(dtype=dtype, num_speculative_tokens=LEAST_NODES)
            return SelfDraftConfig(
                dtype=dtype, num_speculative_tokens=32, max_branching=3, max_tree_nodes=128
            )
        small = copy > WORTH * layers
        why = "the layers take little more" if small else f"{left / 1e9:.2f} GB are left"
        log.info("no draft by a copy in %s bits, which takes %.2f GB: %s", bits, copy / 1e9, why)
    return None


def limit_beside_copy(
    shape: ModelConfig,
    available: int,
    limit: int,
    kv_bytes: int | None,
    place: Callable[[int], Placement],
) -> int:
    """What the weights may take so that a copy finds room, where that brings more than it costs.

    Args:
        available: bytes of memory.
        limit: bytes for the weights without a copy.
        kv_bytes: that keys and values may take; None is a share of what is left.
        place: the placement by a limit; raises :class:`ConfigError` where it is too small.
    """
    alone = place(limit)
    if not alone.streamed:
        return limit
    layers = alone.streamed_bytes * shape.num_layers / len(alone.streamed)
    for dtype in COPIES:
        copy = copy_bytes(shape, dtype)
        left = available - (limit - copy)
        left -= int(left * DEFAULT_MEMORY_SHARE) if kv_bytes is None else kv_bytes
        try:
            beside = place(limit - copy)
        except ConfigError:
            continue
        pays = beside.streamed_bytes < GAIN * alone.streamed_bytes
        if pays and copy <= WORTH * layers and copy <= ROOM * left:
            return limit - copy
    return limit


def copy_bytes(shape: ModelConfig, dtype: str) -> int:
    """What the copy of a dense model's layers takes; rows are filled up to whole blocks."""
    ends = shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)
    unit = FORMATS[FORMAT_OF[dtype]].inputs
    filled = -(-shape.hidden_size // unit) * unit / shape.hidden_size
    return int((shape.num_weights - ends) * filled * WEIGHT_BITS[dtype] / 8)
