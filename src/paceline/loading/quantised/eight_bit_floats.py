"""Linears of 8-bit floats (e4m3): one scale for all weights, one a row, or one for each block."""

from __future__ import annotations

import numpy as np

from paceline.loading.quantised.as_blocks import fp8_blocks
from paceline.loading.quantised.parts import FLOATS, Parts
from paceline.loading.quantised.unpacking import looked_up, powers_of_two
from paceline.loading.quantised.weight import QuantisedWeight
from paceline.tensors.arrays import FLOAT8_E4M3, Array, as_bytes
from paceline.tensors.stored import StoredRows

Block = tuple[int, int]
_E4M3 = np.arange(256, dtype=np.uint8).view(FLOAT8_E4M3).astype(np.float32)


class Fp8Weight(QuantisedWeight):
    """``weight`` float8_e4m3fn ``[n, k]`` and what its values are multiplied by."""

    def __init__(self, parts: Parts, scale: str, block: Block | None) -> None:
        self.parts = parts
        n, k = parts.take(".weight", (FLOAT8_E4M3,), (None, None)).shape
        self.shape = (n, k)
        self._scale = scale
        shapes: dict[tuple[int, ...], Block] = {(): (n, k), (1,): (n, k), (1, 1): (n, k)}
        shapes |= {(n,): (1, k), (n, 1): (1, k)}
        if block is not None:
            shapes[-(-n // block[0]), -(-k // block[1])] = block
        stored = parts.take(scale, (*FLOATS, np.uint8), *shapes)
        self._block = shapes[tuple(stored.shape)]
        self.kind = f"FP8, {_told(self._block, n, k)}"

    def floats(self, first: int, last: int) -> Array:
        high, wide = self._block
        scale = self._scales()[np.arange(first, last) // high]
        values = looked_up(_E4M3, as_bytes(self.parts[".weight"][first:last]))
        values *= scale[:, np.arange(self.shape[1]) // wide]
        return values

    def as_stored(self) -> StoredRows | None:
        return fp8_blocks(self.parts[".weight"], self._scales(), self._block)

    def _scales(self) -> Array:
        """One for each block, float32."""
        parts, name = self.parts, self._scale
        scale = parts[name]
        scale = powers_of_two(parts, name, scale) if scale.dtype == np.uint8 else scale
        rows = -(-self.shape[0] // self._block[0])
        return parts.finite(name, scale).reshape(rows, -1)


def _told(block: Block, n: int, k: int) -> str:
    if block == (n, k):
        return "one scale"
    if block[0] == 1:
        return "one scale a row" if block[1] == k else f"groups of {block[1]}"
    return f"blocks of {block[0]} x {block[1]}"
