"""How much memory keys, values and states of recurrent layers need, and how much there is.

Knows no sequences.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.machine import memory
from paceline.models.backend import BLOCK_SIZE, KV_BYTES, head_elements
from paceline.models.config import ModelConfig
from paceline.models.layer_sizes import Recurrent

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


LEAST_NODES = 16
"""Nodes of a request for which there is always room, so that speculation can be switched on."""
SEQUENCE_SHARE = 2
"""One part in this many of the budget is the most that running requests get."""
CHECKPOINT_SHARE = 4
"""One part in this many of what is left after them is for states of the prefix cache."""
CHECKPOINTS_PER_SEQUENCE = 8
SPARE_SLOTS = 2
"""The empty text's, and one to which a prompt's state is written next."""


class StateRoom(NamedTuple):
    """Sizes of a state memory.

    Attributes:
        num_slots: states that there can be.
        num_lanes: requests that can run at once.
        num_nodes: nodes of one request's step.
        num_bytes: of all of them.
    """

    num_slots: int
    num_lanes: int
    num_nodes: int
    num_bytes: int


def state_bytes(shape: Recurrent) -> int:
    """Bytes of the states of all layers after one text."""
    heads, rows, columns = shape.state_shape
    held = heads * rows * columns + shape.channels * (shape.kernel - 1)
    return 4 * sum(shape.layers) * held


def log_bytes(shape: Recurrent) -> int:
    """Bytes of what all layers keep of a node."""
    added = shape.keys + shape.inner + shape.heads if shape.key_dim else shape.heads
    return 4 * sum(shape.layers) * (shape.channels + added)


def bytes_per_request(shape: Recurrent, draft_nodes: int) -> tuple[int, int]:
    """Nodes of a request's step, and bytes of its state and of its log."""
    nodes = 1 + max(draft_nodes, LEAST_NODES)
    return nodes, state_bytes(shape) + nodes * log_bytes(shape)


def least_budget(shape: Recurrent, lanes: int, draft_nodes: int) -> int:
    """The smallest budget with room for ``lanes`` requests."""
    _, each = bytes_per_request(shape, draft_nodes)
    return SEQUENCE_SHARE * (SPARE_SLOTS * state_bytes(shape) + lanes * each)


def state_room(
    config: ModelConfig, budget: int, max_num_seqs: int, draft_nodes: int, checkpoints: bool
) -> StateRoom:
    """Divide a budget for keys, values and states.

    Args:
        budget: bytes for all of them.
        max_num_seqs: most requests that may run at once; there may be room for fewer.
        draft_nodes: most nodes of a request's drafts.
        checkpoints: whether the prefix cache keeps states.

    Raises:
        ConfigError: there is no room for a single request.
    """
    assert config.recurrent is not None
    slot = state_bytes(config.recurrent)
    nodes, each = bytes_per_request(config.recurrent, draft_nodes)
    lanes = min(max_num_seqs, (budget // SEQUENCE_SHARE - SPARE_SLOTS * slot) // each)
    if lanes < 1:
        least = least_budget(config.recurrent, 1, draft_nodes)
        raise ConfigError(
            f"the states of recurrent layers need {least} bytes of the KV cache's memory for one "
            f"request, and there are {budget}: raise --kv-cache-memory"
        )
    slots, used = lanes + SPARE_SLOTS, lanes * each + SPARE_SLOTS * slot
    if checkpoints:
        most = (budget - used) // CHECKPOINT_SHARE // slot
        kept = min(most, lanes * CHECKPOINTS_PER_SEQUENCE)
        slots, used = slots + kept, used + kept * slot
    return StateRoom(slots, lanes, nodes, used)
