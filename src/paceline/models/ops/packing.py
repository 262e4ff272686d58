"""Weights into the packed form of the native kernels, slice by slice. Knows no forward.

The layouts are those of ``csrc/kernels.h``: tiles of 16 outputs one after another, so that slices
of whole tiles are packed on their own and no more than one slice is in memory as floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.config import PACKED_DTYPES
from paceline.models.blocks import decode
from paceline.models.ops.base import PackedLinear, PackedPart, Rounding, Tensor, WeightPart
from paceline.models.ops.native import native_module
from paceline.models.pages import Arena

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

TILE = 16  # kernels.h
SLICE_ELEMENTS = 1 << 18  # of floats that are quantised at once
STORED_SLICE_ELEMENTS = 1 << 22
FORMAT_OF = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "file": "Q8_0",
    "int8": "Q8_0",
    "int4": "Q4_0",
}
"""What floats become."""
FLOAT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Packer:
    """Packs linears; what they are rounded to depends on ``dtype``.

    Args:
        dtype: ``file`` keeps the formats in which weights are stored, and makes 8-bit blocks of
            those that it does not know; ``int8`` makes such blocks of all weights; ``int4`` makes
            4-bit blocks of all but the embedding and the head, which it makes 8-bit blocks of; the
            others are floats.
    """

    def __init__(self, dtype: str) -> None:
        assert dtype in PACKED_DTYPES
        self.dtype = dtype
        self._roundings: dict[str, Rounding] = {}
        self._arena = Arena()
        self._native = native_module()
        self._native.set_threads(torch.get_num_threads())

    def adopt(self, packed: PackedLinear) -> Any:
        return packed

    def pack_linear(self, parts: Sequence[WeightPart], k: int, bias: Tensor | None) -> Any:
        form = FORMAT_OF[self.dtype]
        packed = [self._packed(part, k, form) for part in parts]
        return self.adopt(PackedLinear(packed, None if bias is None else floats(bias).copy(), k))

    def pack_vector(self, weight: Tensor) -> Tensor:
        return weight.to(torch.float32).contiguous()

    def pack_embedding(self, part: WeightPart, k: int) -> Any:
        form = "Q8_0" if self.dtype == "int4" else FORMAT_OF[self.dtype]
        return self.adopt(PackedLinear([self._packed(part, k, form)], None, k))

    def pack_head(self, part: WeightPart, k: int, embedding: Any) -> Any:
        return self.pack_embedding(part, k) if embedding is None else embedding

    def roundings(self) -> Sequence[Rounding]:
        return list(self._roundings.values())

    def _packed(self, part: WeightPart, k: int, form: str) -> PackedPart:
        """The part in its own format; floats in ``form``."""
        n, name = part.num_outputs, part.format or form
        data = self._arena.zeros(self._native.packed_bytes(name, n, k), np.uint8)
        tile_bytes = len(data) // -(-n // TILE)
        for first, last, rows in _slices(part, k):
            stored = rows.contiguous().numpy() if part.format else self._rounded(name, rows)
            to = data[first // TILE * tile_bytes : last // TILE * tile_bytes]
            self._native.pack(name, stored, k, to)
        order = None if part.order is None else part.order.to(torch.int32).numpy()
        return PackedPart(name, data, n, order)

    def _rounded(self, form: str, rows: Tensor) -> Array:
        """Floats in another format; what that changes is measured where it is not little."""
        if form in FLOAT_TYPES:
            plain: Array = (
                rows.detach().to(FLOAT_TYPES[form]).contiguous().view(torch.uint8).numpy()
            )
            return plain
        weights = floats(rows)
        blocks: Array = self._native.quantise(form, weights)
        if form != "Q8_0" or self.dtype == "file":
            rounding = self._roundings.setdefault(form, Rounding(form))
            error = decode(form, blocks).floats()[:, : weights.shape[1]] - weights
            rounding.squared_error += float(np.vdot(error, error))
            rounding.squares += float(np.vdot(weights, weights))
        return blocks


def _slices(part: WeightPart, k: int) -> Iterator[tuple[int, int, Tensor]]:
    """Rows of whole tiles: the first, the last plus one up to a whole tile, the rows."""
    most = STORED_SLICE_ELEMENTS if part.format else SLICE_ELEMENTS
    step = max(TILE, most // k // TILE * TILE)
    for first in range(0, part.num_outputs, step):
        rows = part.read(first, min(first + step, part.num_outputs))
        yield first, first + -(-len(rows) // TILE) * TILE, rows


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
