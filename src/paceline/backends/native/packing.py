"""Weights into the packed form of the native kernels, slice by slice, and back. Knows no forward.

The layouts are those of ``csrc/kernels/kernels.h``: tiles of 16 outputs one after another, so that
slices of whole tiles are packed on their own and no more than one slice is in memory as floats.

What an adapter adds to floats is floats as they are stored. What it adds to quantised weights reads
their quantised inputs, and so is 8-bit blocks, but for an ``up`` that would be no smaller for it.
A model's layers are packed once more in fewer bits (:func:`read_layers`) out of the checkpoint that
it was loaded from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.backends.native.native import native_module
from paceline.config import PACKED_DTYPES
from paceline.loading.checkpoint import Checkpoint
from paceline.models.backend import (
    AdaptedLayers,
    LowRank,
    Ops,
    PackedLinear,
    PackedOps,
    PackedPart,
    Rounding,
    WeightPart,
)
from paceline.models.config import ModelConfig
from paceline.models.decoder_reader import DecoderReader
from paceline.models.tensor_reader import TensorReader, packed_parts
from paceline.models.threads import num_threads
from paceline.models.weights import Layer
from paceline.tensors.arrays import (
    STORED_FLOATS,
    Arena,
    Array,
    Floats,
    as_bytes,
    floats,
    give_back_freed,
)
from paceline.tensors.quantised_blocks import decode

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
    "int3": "Q3_K",
    "int2": "Q2_K",
}
"""What floats become."""
WEIGHT_BITS = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "int8": 8.5,
    "int4": 4.5,
    "int3": 3.5625,
    "int2": 2.625,
}
"""Bits per packed weight, with the scales."""
FEW_BITS = ("int4", "int3", "int2")
"""Of which the embedding and the head have 8."""


class Packer:
    """Packs linears; what they are rounded to depends on ``dtype``.

    Args:
        dtype: ``file`` keeps the formats in which weights are stored, and makes 8-bit blocks of
            those that it does not know; ``int8`` makes such blocks of all weights; ``int4``,
            ``int3`` and ``int2`` make blocks of so many bits of all but the embedding and the head,
            which they make 8-bit blocks of; the others are floats.
    """

    def __init__(self, dtype: str) -> None:
        assert dtype in PACKED_DTYPES
        self.dtype = dtype
        self._roundings: dict[str, Rounding] = {}
        self._arena = Arena()
        self._native = native_module()
        self._native.set_threads(num_threads())

    join = staticmethod(np.concatenate)

    def adopt(self, packed: PackedLinear) -> Any:
        return packed

    def pack_linear(self, parts: Sequence[WeightPart], k: int, bias: Array | None) -> Any:
        form = FORMAT_OF[self.dtype]
        packed = [self._packed(part, k, form) for part in parts]
        return self.adopt(PackedLinear(packed, None if bias is None else floats(bias).copy(), k))

    def pack_vector(self, weight: Array) -> Floats:
        return np.ascontiguousarray(floats(weight))

    def pack_embedding(self, part: WeightPart, k: int) -> Any:
        return self._end(part, k, None)

    def pack_head(self, part: WeightPart, k: int, embedding: Any, bias: Array | None = None) -> Any:
        return embedding if embedding is not None and bias is None else self._end(part, k, bias)

    def _end(self, part: WeightPart, k: int, bias: Array | None) -> Any:
        form = "Q8_0" if self.dtype in FEW_BITS else FORMAT_OF[self.dtype]
        vector = None if bias is None else floats(bias).copy()
        return self.adopt(PackedLinear([self._packed(part, k, form)], vector, k))

    def roundings(self) -> Sequence[Rounding]:
        return list(self._roundings.values())

    def _packed(self, part: WeightPart, k: int, form: str) -> PackedPart:
        """The part in its own format; floats in ``form``."""
        n, name = part.num_outputs, part.format or form
        data = self._arena.zeros(self._native.packed_bytes(name, n, k), np.uint8)
        tile_bytes = len(data) // -(-n // TILE)
        for first, last, rows in _slices(part, k):
            stored = np.ascontiguousarray(rows) if part.format else self._rounded(name, rows)
            to = data[first // TILE * tile_bytes : last // TILE * tile_bytes]
            self._native.pack(name, stored, k, to)
        order = None if part.order is None else part.order.astype(np.int32)
        return PackedPart(name, data, n, order)

    def _rounded(self, form: str, rows: Array) -> Array:
        """Floats in another format; what that changes is measured where it is not little."""
        if form in STORED_FLOATS:
            return as_bytes(rows.astype(STORED_FLOATS[form], copy=False))
        weights = np.ascontiguousarray(floats(rows))
        blocks: Array = self._native.quantise(form, weights)
        if form != "Q8_0" or self.dtype == "file":
            rounding = self._roundings.setdefault(form, Rounding(form))
            error = decode(form, blocks).floats()[:, : weights.shape[1]] - weights
            rounding.squared_error += float(np.vdot(error, error))
            rounding.squares += float(np.vdot(weights, weights))
        return blocks


def _slices(part: WeightPart, k: int) -> Iterator[tuple[int, int, Array]]:
    """Rows of whole tiles: the first, the last plus one up to a whole tile, the rows."""
    most = STORED_SLICE_ELEMENTS if part.format else SLICE_ELEMENTS
    step = max(TILE, most // k // TILE * TILE)
    for first in range(0, part.num_outputs, step):
        rows = part.read(first, min(first + step, part.num_outputs))
        yield first, first + -(-len(rows) // TILE) * TILE, rows


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


def read_layers(checkpoint: Checkpoint, config: ModelConfig, ops: Ops) -> list[Layer]:
    """The layers of ``config``, which may be fewer than the checkpoint has, packed by ``ops``."""
    reader_type = TensorReader if checkpoint.packed is None else _PackedReader
    tensors = reader_type(checkpoint.tensors, config, ops)
    reader = DecoderReader(tensors)
    layers = [reader.layer(index) for index in range(config.num_layers)]
    tensors.log_rounding()
    give_back_freed()
    return layers


class _PackedReader(TensorReader):
    """Reads the linears of a packed folder as floats, which the backend packs anew."""

    def linear(self, names: list[str], fused: str, outs: list[int], width: int, bias: bool) -> Any:
        packed = native_module().Linear(packed_parts(self._tensors, fused, outs), None, width)
        rows: Array = packed.rows(np.arange(packed.n, dtype=np.int32))
        self._rounded["packed weights"] += 1
        vector = self._tensors[f"{fused}.bias"] if bias else None
        return self.ops.pack_linear([WeightPart.of(rows)], width, vector)
