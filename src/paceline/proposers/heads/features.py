"""The target's hidden states, made one vector per position and kept with its keys and values.

They lie by the slots of the target's KV cache, each with its token: whatever a request finds there,
in a prefix that another request has computed as in a fork, it finds here as well, if somebody read
the hidden states. A slot that holds another token by now has none. Knows no request and no head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from paceline.cache.kv_cache import KVCache
from paceline.core.errors import ProposerError
from paceline.models.backend import BLOCK_SIZE, Ops, Slots
from paceline.tensors.arrays import Floats
from paceline.tensors.pages import sparse_zeros

LARGEST = float(np.finfo(np.float16).max)
Fuse = Callable[[Floats], Floats]
"""``[rows, taps, hidden_size]`` to ``[rows, width]``, float32."""
NO_TOKEN = -1
PENDING_ROWS = 256
"""Rows that wait to be made one vector each, together, which takes less than one by one."""


class Fusion:
    """One vector out of the hidden states of several layers: fc, and norms where a head has them.

    Args:
        ops: computes the linear.
        fc: the packed linear, ``taps * hidden_size`` to the width of the vector.
        norm: weights over all of its inputs; None for none.
        groups: parts of the inputs that are normalised each by itself.
        eps: of the norms.
        last_norm: weights over the vector; None for none.
    """

    def __init__(
        self,
        ops: Ops,
        fc: object,
        norm: Floats | None,
        groups: int,
        eps: float,
        last_norm: Floats | None = None,
    ) -> None:
        self._ops, self._fc = ops, fc
        self._last_norm = last_norm
        self._norm, self._groups, self._eps = norm, groups, eps

    def __call__(self, features: Floats) -> Floats:
        """``[rows, taps, hidden_size]`` to ``[rows, width]``, float32."""
        rows = len(features)
        x = features.reshape(rows, -1)
        if self._norm is not None:
            x = self._normed(x.reshape(rows, self._groups, -1)).reshape(rows, -1) * self._norm
        y = self._ops.linear(x, self._fc)
        return y if self._last_norm is None else self._normed(y) * self._last_norm

    def _normed(self, x: Floats) -> Floats:
        mean = np.square(x).mean(axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean + np.float32(self._eps))
        return normed


def first_tap(features: Floats) -> Floats:
    """The hidden states of a head that reads one tap as it is."""
    return features[:, 0]


class Features:
    """Fused hidden states, in 16 bits, by the slots of a KV cache.

    Args:
        kv: of the target.
        fuse: makes one vector out of those of all taps.
        inputs: taps, and the width of each.
        width: of the vector.
    """

    def __init__(
        self,
        kv: KVCache,
        fuse: Fuse,
        inputs: tuple[int, int],
        width: int,
    ) -> None:
        self.num_blocks = kv.memory.num_blocks
        self._rows = sparse_zeros((self.num_blocks * BLOCK_SIZE, width), np.float16)
        self._tokens = np.full(len(self._rows), NO_TOKEN, np.int32)
        self._fuse, self._inputs = fuse, inputs
        self._slots: list[Slots] = []
        self._pending: list[Floats] = []
        self._num_pending = 0
        kv.follow(self)

    @staticmethod
    def num_bytes(kv: KVCache, width: int) -> int:
        """Of the vectors and their tokens, once all slots are in use."""
        return kv.memory.num_blocks * BLOCK_SIZE * (width * 2 + 4)

    def known(self, slots: Slots, token_ids: Sequence[int]) -> int:
        """Of slots that hold these tokens, how many of the last ones have hidden states."""
        missing = np.flatnonzero(self._tokens[slots] != np.array(token_ids, np.int32))
        return len(slots) - (int(missing[-1]) + 1 if len(missing) else 0)

    def write(self, slots: Slots, token_ids: Sequence[int], features: Floats) -> None:
        """Take hidden states ``[slots, taps, hidden_size]`` of the tokens that these slots hold."""
        if features.shape != (len(slots), *self._inputs):
            raise ProposerError(
                f"hidden states {tuple(features.shape)} for {len(slots)} positions; the head reads "
                f"{self._inputs} of each"
            )
        self._tokens[slots] = token_ids
        self._slots.append(slots)
        self._pending.append(features)
        self._num_pending += len(slots)
        if self._num_pending >= PENDING_ROWS:
            self._settle()

    def read(self, slots: Slots) -> Floats:
        """``[slots, width]`` float32."""
        self._settle()
        return self._rows[slots].astype(np.float32)

    def move(self, source: Slots, target: Slots) -> None:
        with suppress(Exception):  # the KV moves all the same, and reading fails again
            self._settle()
        self._rows[target] = self._rows[source]
        self._tokens[target] = self._tokens[source]

    def fill(self, slots: Slots, value: float) -> None:
        self._settle()
        self._rows[slots] = value
        self._tokens[slots] = NO_TOKEN

    def _settle(self) -> None:
        """Write what is pending; a slot that came twice holds what came last."""
        if self._slots:
            slots, self._slots = self._slots, []
            pending, self._pending = self._pending, []
            self._num_pending = 0
            fused = self._fuse(np.concatenate(pending)).clip(-LARGEST, LARGEST)
            ends = np.cumsum([*map(len, slots)])
            for each, part in zip(slots, np.split(fused, ends[:-1]), strict=True):
                self._rows[each] = part
