"""Adapters into the packed form of the native kernels. Knows no forward.

What is added to floats is floats as they are stored. What is added to quantised weights reads their
quantised inputs, and so is 8-bit blocks, but for an ``up`` that would be no smaller for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.backends.native.native import native_module
from paceline.backends.native.packing import TILE
from paceline.models.backend import AdaptedLayers, LowRank, PackedOps, WeightPart
from paceline.models.weights import Layer
from paceline.tensors.arrays import Array

BLOCKS, BLOCK_INPUTS = "Q8_0", 32
LINEARS = ("qkv", "o", "gate_up", "down")


class AdapterPacker:
    """Packs one adapter.

    Args:
        ops: makes 8-bit blocks of floats that it may round, in memory that no other weights are
            in, so that it is given back with the adapter.
    """

    def __init__(self, ops: PackedOps) -> None:
        self._ops, self._native = ops, native_module()

    def layers(self, to: Sequence[Layer], added: AdaptedLayers) -> list[Mapping[str, Any]]:
        """What ``csrc/forward/adapter.cpp`` reads of what is added to layers."""
        return [
            {name: self._added(getattr(layer, name), parts.get(name)) for name in LINEARS}
            for layer, parts in zip(to, added, strict=False)  # which the native side checks
        ]

    def _added(self, linear: Any, parts: Sequence[LowRank] | None) -> Any:
        if not parts:
            return None
        takes_codes, order = linear.reads
        width = parts[0].down.shape[1]
        found = []
        for part in parts:
            up = self._up(part.up, takes_codes)
            padding = -len(part.down) % (TILE if up.format else BLOCK_INPUTS)
            down = np.pad(part.down, ((0, padding), (0, 0)))
            down = down if order is None else down[:, order]
            found.append((part, _weight(down, takes_codes), up))
        found.sort(key=lambda each: each[2].format is not None)  # codes come first
        return (
            self._ops.pack_linear([down for _, down, _ in found], width, None),
            [
                (part.first, self._ops.pack_linear([up], part.up.shape[1], None), part.scale)
                for part, _, up in found
            ],
        )

    def _up(self, weight: Array, may_round: bool) -> WeightPart:
        stored, size = _weight(weight, False), self._native.packed_bytes
        smaller = size(BLOCKS, *weight.shape) < size(stored.format, *weight.shape)
        return _weight(weight, may_round and smaller)


def _weight(weight: Array, may_round: bool) -> WeightPart:
    return WeightPart.of(weight) if may_round else WeightPart.stored(weight)
