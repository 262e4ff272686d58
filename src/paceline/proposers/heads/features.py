"""The target's hidden states, made one vector per position and kept with its keys and values.

They lie by the slots of the target's KV cache, each with its token: whatever a request finds there,
in a prefix that another request has computed as in a fork, it finds here as well, if somebody read
the hidden states. A slot that holds another token by now has none. Knows no request and no head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch

from paceline.errors import ProposerError
from paceline.models.ops.base import BLOCK_SIZE, Ops, Slots, Tensor
from paceline.models.pages import sparse_zeros
from paceline.runtime.kv_cache import KVCache

LARGEST = torch.finfo(torch.float16).max
Fuse = Callable[[Tensor], Tensor]
"""``[rows, taps, hidden_size]`` to ``[rows, width]``, float32."""
NO_TOKEN = -1
PENDING_ROWS = 256
"""Rows that wait to be made one vector each, together, which takes less than one by one."""


def padded_linear(ops: Ops, x: Tensor, packed: object) -> Tensor:
    """A packed linear of any number of rows, ``[rows, in]`` to ``[rows, out]``, float32."""
    padding = -len(x) % getattr(ops, "row_multiple", 1)
    rows = torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x
    return ops.linear(rows.contiguous(), packed)[: len(x)]


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
        norm: Tensor | None,
        groups: int,
        eps: float,
        last_norm: Tensor | None = None,
    ) -> None:
        self._ops, self._fc = ops, fc
        self._last_norm = last_norm
        self._norm, self._groups, self._eps = norm, groups, eps

    @torch.inference_mode()
    def __call__(self, features: Tensor) -> Tensor:
        """``[rows, taps, hidden_size]`` to ``[rows, width]``, float32."""
        rows = len(features)
        x = features.reshape(rows, -1)
        if self._norm is not None:
            x = self._normed(x.view(rows, self._groups, -1)).view(rows, -1) * self._norm
        y = padded_linear(self._ops, x, self._fc)
        return y if self._last_norm is None else self._normed(y) * self._last_norm

    def _normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._eps)


def first_tap(features: Tensor) -> Tensor:
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
        device: torch.device,
    ) -> None:
        self.num_blocks = kv.memory.num_blocks
        rows = sparse_zeros((self.num_blocks * BLOCK_SIZE, width), np.float16)
        self._rows = torch.from_numpy(rows).to(device)
        self._tokens = np.full(len(rows), NO_TOKEN, np.int32)
        self._fuse, self._inputs = fuse, inputs
        self._slots: list[Slots] = []
        self._pending: list[Tensor] = []
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

    def write(self, slots: Slots, token_ids: Sequence[int], features: Tensor) -> None:
        """Take hidden states ``[slots, taps, hidden_size]`` of the tokens that these slots hold.

        Raises:
            ProposerError: they are of another shape.
        """
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

    def read(self, slots: Slots) -> Tensor:
        """``[slots, width]`` float32."""
        self._settle()
        return self._rows.index_select(0, self._index(slots)).float()

    def move(self, source: Slots, target: Slots) -> None:
        with suppress(Exception):  # the KV moves all the same, and reading fails again
            self._settle()
        moved = self._rows.index_select(0, self._index(source))
        self._rows.index_copy_(0, self._index(target), moved)
        self._tokens[target] = self._tokens[source]

    def fill(self, slots: Slots, value: float) -> None:
        self._settle()
        self._rows.index_fill_(0, self._index(slots), value)
        self._tokens[slots] = NO_TOKEN

    def _index(self, slots: Slots) -> Tensor:
        return torch.from_numpy(slots).to(self._rows.device)

    def _settle(self) -> None:
        """Write what is pending; a slot that came twice holds what came last."""
        if self._slots:
            slots, self._slots = self._slots, []
            pending, self._pending = self._pending, []
            self._num_pending = 0
            fused = self._fuse(torch.cat(pending)).clamp(-LARGEST, LARGEST).half()
            for each, part in zip(slots, fused.split([*map(len, slots)]), strict=True):
                self._rows.index_copy_(0, self._index(each), part)
