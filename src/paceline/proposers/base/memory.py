"""The KV caches of models that draft, with states of recurrent layers where they have some. Owns
their size; knows no weights.
"""

from __future__ import annotations

import logging

from paceline.cache.blocks import blocks_for
from paceline.cache.kv_cache import KVCache
from paceline.cache.memory_needs import bytes_per_block, state_room
from paceline.cache.states import States
from paceline.config import SpeculativeConfig
from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.proposers.base import TargetInfo

log = logging.getLogger(__name__)


def draft_kv(
    shape: ModelConfig, ops: Ops, config: SpeculativeConfig, target: TargetInfo, max_len: int
) -> KVCache:
    """As many blocks as all requests at their longest could use, or as the bytes allow."""
    states, budget = None, target.kv_bytes
    if shape.recurrent is not None:
        room = state_room(shape, budget, target.max_num_seqs, config.tree_nodes, checkpoints=False)
        states = States(ops.state_memory(shape, room.num_slots, room.num_lanes, room.num_nodes))
        budget -= room.num_bytes
        log.info(
            "states of the draft's recurrent layers take %.1f MB; at most %d requests are drafted "
            "for at once",
            room.num_bytes / 1e6,
            room.num_lanes,
        )
    per_request = blocks_for(max_len + config.tree_nodes)
    num_blocks = min(
        budget // bytes_per_block(shape, ops.default_kv_dtype),
        1 + target.max_num_seqs * per_request,
    )
    memory = ops.kv_memory(shape, max(0, num_blocks), ops.default_kv_dtype)
    return KVCache(memory, prefix_caching=False, states=states)
