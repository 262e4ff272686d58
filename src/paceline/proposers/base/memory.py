"""The KV caches of models that draft. Owns their size; knows no weights."""

from __future__ import annotations

from paceline.config import SpeculativeConfig
from paceline.models.config import ModelConfig
from paceline.models.ops.base import Ops
from paceline.proposers.base import TargetInfo
from paceline.runtime.kv_cache import KVCache, blocks_for, bytes_per_block


def draft_kv(
    shape: ModelConfig, ops: Ops, config: SpeculativeConfig, target: TargetInfo, max_len: int
) -> KVCache:
    """As many blocks as all requests at their longest could use, or as the bytes allow.

    Raises:
        ConfigError: there is no memory for it.
    """
    per_request = blocks_for(max_len + config.tree_nodes)
    num_blocks = min(
        target.kv_bytes // bytes_per_block(shape, ops.default_kv_dtype),
        1 + target.max_num_seqs * per_request,
    )
    memory = ops.kv_memory(shape, max(0, num_blocks), ops.default_kv_dtype)
    return KVCache(memory, prefix_caching=False)
