"""Weights into the packed form of the native kernels, slice by slice. Knows no forward.

The layouts are those of ``csrc/kernels.h``: tiles of 16 outputs one after another, so that slices
of whole tiles are packed on their own and no more than one slice is in memory as floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.config import PACKED_DTYPES
from paceline.models.ops.base import PackedLinear, ReadRows, Rounding, Tensor
from paceline.models.ops.native import native_module
from paceline.models.pages import Arena

Floats = npt.NDArray[np.float32]

TILE, K_MULTIPLE, GROUP, GROUP_BYTES = 16, 64, 32, 288  # kernels.h
SLICE_ELEMENTS = 1 << 18  # of weights that are packed at once


class Packer:
    """Packs linears to ``dtype``, ``int8`` or ``int4``; embedding and head are always int8."""

    def __init__(self, dtype: str) -> None:
        assert dtype in PACKED_DTYPES
        self.dtype = dtype
        self.rounding = Rounding()
        self._arena = Arena()
        self._native = native_module()
        self._native.set_threads(torch.get_num_threads())

    def adopt(self, packed: PackedLinear) -> Any:
        return packed

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        n, k = weight.shape
        return self.pack_linear_rows(_reading(weight), n, k, bias)

    def pack_linear_rows(self, read: ReadRows, n: int, k: int, bias: Tensor | None) -> Any:
        return (self._int4 if self.dtype == "int4" else self._int8)(read, n, k, bias)

    def pack_vector(self, weight: Tensor) -> Tensor:
        return weight.to(torch.float32).contiguous()

    def pack_embedding(self, weight: Tensor) -> Any:
        return self.pack_rows(_reading(weight), *weight.shape)

    def pack_rows(self, read: ReadRows, n: int, k: int) -> Any:
        return self._int8(read, n, k, None)

    def pack_head(self, weight: Tensor, embedding: Any) -> Any:
        return self.pack_embedding(weight) if embedding is None else embedding

    def pack_q4_0(self, read: ReadRows, n: int, k: int, bias: Tensor | None) -> Any:
        data, tile_bytes = self._int4_data(n, k)
        for first, last, blocks in _slices(read, n, k):
            packed = self._native.pack_q4_0(np.ascontiguousarray(blocks.numpy()))
            data[first // TILE * tile_bytes : last // TILE * tile_bytes] = packed
        return self.adopt(PackedLinear(data, None, _vector(bias), n, k))

    def _int8(self, read: ReadRows, n: int, k: int, bias: Tensor | None) -> Any:
        row_bytes = _round_up(k, K_MULTIPLE)
        data = self._arena.zeros(_round_up(n, TILE) * row_bytes, np.int8)
        scale = np.empty(_round_up(n, TILE), np.float32)
        for first, last, rows in _slices(read, n, k):
            part = slice(first * row_bytes, last * row_bytes)
            data[part], scale[first:last] = self._native.pack_int8(floats(rows))
        return self.adopt(PackedLinear(data, scale, _vector(bias), n, k))

    def _int4(self, read: ReadRows, n: int, k: int, bias: Tensor | None) -> Any:
        data, tile_bytes = self._int4_data(n, k)
        for first, last, part in _slices(read, n, k):
            rows = floats(part)
            packed = self._native.pack_int4(rows)
            data[first // TILE * tile_bytes : last // TILE * tile_bytes] = packed
            error = self._native.unpack_int4(packed, *rows.shape)
            error -= rows
            self.rounding.squared_error += float(np.vdot(error, error))
            self.rounding.squares += float(np.vdot(rows, rows))
        return self.adopt(PackedLinear(data, None, _vector(bias), n, k))

    def _int4_data(self, n: int, k: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Memory for the tiles of a 4-bit linear, and the bytes of one."""
        tile_bytes = _round_up(k, K_MULTIPLE) // GROUP * GROUP_BYTES
        return self._arena.zeros(_round_up(n, TILE) // TILE * tile_bytes, np.uint8), tile_bytes


def _reading(weight: Tensor) -> ReadRows:
    return lambda first, last: weight[first:last]


def _slices(read: ReadRows, n: int, k: int) -> Iterator[tuple[int, int, Tensor]]:
    """Rows of whole tiles: the first, the last plus one up to a whole tile, the rows."""
    step = max(TILE, SLICE_ELEMENTS // k // TILE * TILE)
    for first in range(0, n, step):
        rows = read(first, min(first + step, n))
        yield first, first + _round_up(len(rows), TILE), rows


def floats(tensor: Tensor) -> Floats:
    """As float32, by this thread alone where that is easy.

    torch's threads would not go to sleep at once, and hold the cores that packing needs.
    """
    plain = tensor.detach().contiguous()
    if plain.dtype == torch.bfloat16:
        bits: npt.NDArray[np.uint16] = plain.view(torch.uint16).numpy()
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    array: Floats = plain.to(torch.float32).numpy()
    return array


def _vector(bias: Tensor | None) -> Floats | None:
    return None if bias is None else floats(bias).copy()


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
