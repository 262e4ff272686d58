"""States and logs of recurrent layers as the native kernels keep them. Knows no sequences.

What is where :class:`~paceline.models.backend.StateMemory` says; ``csrc/kernels/recurrent.h`` says
how the kernels read and write it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.backends.native.native import native_module
from paceline.models.backend import BLOCK_SIZE, StateArrays
from paceline.models.config import ModelConfig
from paceline.models.threads import num_threads
from paceline.tensors.pages import sparse_zeros


class NativeStates(StateArrays):
    """Arrays of float32; the first dimension is a model's recurrent layers, in their order.

    Attributes:
        conv: ``[layers, slots, kernel - 1, channels]``, the oldest row first.
        state: ``[layers, slots, heads, tiles * key_dim * 16]``: for every 16 columns of a head's
            values a tile, a row per key; columns beyond ``value_dim`` are never looked at.
        log_conv, log_key, log_added, log_decay: ``[layers, lanes, nodes, ...]``, what of a row is
            logged: what the convolution read, keys, what they are multiplied with, and decays.
    """

    def __init__(self, config: ModelConfig, num_slots: int, num_lanes: int, num_nodes: int) -> None:
        r = config.recurrent
        assert r is not None
        self.num_slots, self.num_lanes, self.num_nodes = num_slots, num_lanes, num_nodes
        self._native, self._groups, self._key_dim = native_module(), r.groups, r.key_dim
        layers = sum(r.layers)
        tiles = -(-r.value_dim // BLOCK_SIZE)
        held, logged = (layers, num_slots), (layers, num_lanes, num_nodes)
        self.conv = sparse_zeros((*held, r.kernel - 1, r.channels), np.float32)
        self.state = sparse_zeros((*held, r.heads, tiles * r.key_dim * BLOCK_SIZE), np.float32)
        self.log_conv = sparse_zeros((*logged, r.channels), np.float32)
        self.log_key = sparse_zeros((*logged, r.keys), np.float32)
        self.log_added = sparse_zeros((*logged, r.inner), np.float32)
        self.log_decay = sparse_zeros((*logged, r.heads), np.float32)
        self.held = self.conv, self.state
        self.logs = self.log_conv, self.log_key, self.log_added, self.log_decay
        self.due = np.zeros((layers, num_lanes), np.uint8)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order in which the kernels take them."""
        return *self.held, *self.logs, self.due

    def fold(self, slot: int, lane: int, path: Sequence[int]) -> None:
        self._native.set_threads(num_threads())
        self._native.fold_states(*self.arrays, self._groups, self._key_dim, slot, lane, list(path))
