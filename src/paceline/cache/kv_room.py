"""How much memory keys and values take, and how much there is. Knows no sequences."""

from __future__ import annotations

import os

from paceline.core.memory import memory
from paceline.models.backend import BLOCK_SIZE, KV_BYTES, head_elements
from paceline.models.config import ModelConfig

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
    """Bytes that a process can have, as far as the platform tells: with those that keep parts of
    files, such as a model's that was read just now, but no more than the control group allows."""
    _, available = memory()
    if available is not None:
        return available
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30
