"""Linears of floats of 8 and of 4 bits.

Of 8 bits (e4m3) they have one scale for all weights, one a row, or one for each block. Of 4 bits
(e2m1) there is a scale for each group, in MXFP4 and in NVFP4; a value doubled is a whole number, so
codes stand for those and scales are halved.
"""

from __future__ import annotations

import numpy as np

from paceline.loading.quantised.weight import (
    FLOATS,
    CodedWeight,
    Parts,
    QuantisedWeight,
    fp8_blocks,
    looked_up,
    powers_of_two,
    unpack_nibbles,
)
from paceline.tensors.arrays import FLOAT8_E4M3, Array, as_bytes, floats
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


_BYTES = (np.uint8,)


class Fp4Weight(CodedWeight):
    """Two codes a byte ``[n, k / 2]``, the first in the low half."""

    bits = 4
    is_fp4 = True
    codes_part: str

    def _codes_of(self, first: int, last: int) -> Array:
        parts = self.parts
        return unpack_nibbles(parts[self.codes_part][first:last].reshape(last - first, -1))


class Mxfp4Weight(Fp4Weight):
    """Groups of 32 with powers of two as scales, bytes ``[n, k / 32]``.

    Args:
        codes: the part that holds the codes; its bytes may lie in blocks, ``[n, k / 32, 16]``.
        scale: the part that holds the scales.
    """

    def __init__(self, parts: Parts, codes: str, scale: str) -> None:
        self.parts, self.codes_part, self._scale = parts, codes, scale
        n, self.groups = parts.take(scale, _BYTES, (None, None)).shape
        parts.take(codes, _BYTES, (n, self.groups * 16), (n, self.groups, 16))
        self.shape = (n, self.groups * 32)
        self.kind = "MXFP4"

    def read(self, first: int, last: int) -> tuple[Array, Array, Array]:
        exponents = self.parts[self._scale][first:last]
        scale = powers_of_two(self.parts, self._scale, exponents, lower=1)
        return self._codes_of(first, last), scale, np.zeros(scale.shape, np.uint8)

    def as_stored(self) -> StoredRows:
        """The bytes in another order, which is all that the blocks of linears differ in: a model's
        experts are too many to unpack them."""
        n, _ = self.shape
        exponents = self.parts[self._scale][:]
        powers_of_two(self.parts, self._scale, exponents)
        pairs = self.parts[self.codes_part][:].reshape(n, self.groups, 2, 8)
        low, high = pairs[:, :, 0], pairs[:, :, 1]  # the first and the last 16 inputs of each group
        blocks = np.empty((n, self.groups, 17), np.uint8)
        blocks[:, :, 0] = exponents
        blocks[:, :, 1::2] = low & 15 | high << 4
        blocks[:, :, 2::2] = low >> 4 | high & 240
        return StoredRows("MXFP4", blocks.reshape(n, -1))


class Nvfp4Weight(Fp4Weight):
    """Groups of 16 with 8-bit floats as scales, ``[n, k / 16]``, and one scale for all of those."""

    def __init__(self, parts: Parts, codes: str, whole: str, *, divides: bool) -> None:
        self.parts, self.codes_part, self._whole, self._divides = parts, codes, whole, divides
        n, self.groups = parts.take(".weight_scale", (FLOAT8_E4M3,), (None, None)).shape
        parts.take(codes, _BYTES, (n, self.groups * 8))
        parts.take(whole, (np.float32,), (), (1,))
        self.shape = (n, self.groups * 16)
        self.kind = "NVFP4"

    def read(self, first: int, last: int) -> tuple[Array, Array, Array]:
        parts = self.parts
        whole = parts.finite(self._whole, parts[self._whole].reshape(()))
        if self._divides and whole == 0:
            raise parts.error(self._whole, "is 0", "another number, since scales are divided by it")
        scale = floats(parts[".weight_scale"][first:last])
        scale = parts.finite(".weight_scale", scale / whole if self._divides else scale * whole)
        zero = np.zeros(scale.shape, np.uint8)
        return self._codes_of(first, last), scale / 2, zero
