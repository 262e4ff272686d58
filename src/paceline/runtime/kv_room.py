"""How much memory keys and values take, and how much there is. Knows no sequences."""

from __future__ import annotations

import os

from paceline.models.config import ModelConfig
from paceline.models.ops.base import BLOCK_SIZE, KV_BYTES, head_elements

DEFAULT_MEMORY_SHARE = 0.25
BOOKKEEPING_BYTES = 1024
"""What a block counts for in models without attention: it is kept account of all the same."""


def bytes_per_block(config: ModelConfig, dtype: str) -> int:
    """Bytes of a block of 16 tokens; heads may be padded to a multiple of 16."""
    width = 0
    for dim, kv_heads, _ in map(config.heads_of, filter(config.owns_kv, range(config.num_layers))):
        width += config.kv_arrays * kv_heads * head_elements(-(-dim // 16) * 16, dtype)
    return width * BLOCK_SIZE * KV_BYTES[dtype] or BOOKKEEPING_BYTES


def free_memory() -> int:
    """Bytes of physical memory that are free, as far as the platform tells."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30
