"""The KV caches of models that draft. Owns their size; knows no weights."""

from __future__ import annotations

from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.ops.base import Ops
from paceline.proposers.base import TargetInfo
from paceline.runtime.kv_cache import KVCache
from paceline.runtime.kv_room import bytes_per_block
from paceline.runtime.sequence_kv import blocks_for


def check_drafts(shape: ModelConfig) -> None:
    """Raise :class:`ConfigError` where a model cannot draft: states of recurrent layers do not go
    back to where the target's text has left the draft."""
    if shape.recurrent is not None:
        raise ConfigError(
            f"{shape.architecture} has recurrent layers and cannot draft; as a target it can be "
            "drafted for by prompt_lookup, suffix, ngram_model, heads, or a draft model whose "
            "layers are all attention"
        )


def draft_kv(
    shape: ModelConfig, ops: Ops, config: SpeculativeConfig, target: TargetInfo, max_len: int
) -> KVCache:
    """As many blocks as all requests at their longest could use, or as the bytes allow.

    Raises:
        ConfigError: there is no memory for it, or the model cannot draft.
    """
    check_drafts(shape)
    per_request = blocks_for(max_len + config.tree_nodes)
    num_blocks = min(
        target.kv_bytes // bytes_per_block(shape, ops.default_kv_dtype),
        1 + target.max_num_seqs * per_request,
    )
    memory = ops.kv_memory(shape, max(0, num_blocks), ops.default_kv_dtype)
    return KVCache(memory, prefix_caching=False)
