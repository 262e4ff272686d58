"""Linears of 4 bits as bitsandbytes stores them (nf4 and fp4).

A table says what the 16 codes stand for; blocks run through the matrix row after row, each with its
largest magnitude. With nested quantisation those magnitudes are 8-bit codes themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.loading.quantised.integers import Int8Weight
from paceline.loading.quantised.weight import (
    FLOATS,
    Parts,
    QuantisedWeight,
    Scheme,
    looked_up,
    unpack_nibbles,
)
from paceline.models.families.fields import Fields, supported
from paceline.tensors.arrays import BFLOAT16, Array, as_bytes, floats

_TABLES = (".weight.absmax", ".weight.quant_map")
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
_STATE_BYTES = 1 << 16
_MOST_ROWS, _MOST_IN_BLOCK = 1 << 24, 1 << 16
_TYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}
_FLOAT, _BYTE = (np.float32,), (np.uint8,)


def schemes(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    del config  # what is stored says it all
    of_four_bits = [
        Scheme(state, (".weight", state, *_TABLES, *_NESTED), partial(Bnb4Weight, state=state))
        for state in (".weight.quant_state.bitsandbytes__" + kind for kind in ("nf4", "fp4"))
    ]
    return (*of_four_bits, Scheme(".SCB", (".weight", ".SCB", ".weight_format"), _int8))


def _int8(parts: Parts) -> Int8Weight:
    if parts.has(".weight_format"):
        form = parts.take(".weight_format", _BYTE, (), (1,))
        if form.any():
            raise UnsupportedModelError(
                f"{parts.name('.weight_format')} is {form.item()}: the weights are laid out for "
                "one kind of GPU; only rows (0) are supported, which newer bitsandbytes writes"
            )
    return Int8Weight(parts, ".SCB", factor=1 / 127, made_by="bitsandbytes")


class Bnb4Weight(QuantisedWeight):
    """``weight`` uint8 ``[n * k / 2, 1]``, the first code of each byte in its upper half.

    These bytes may be stored as numbers of another type (``bnb_4bit_quant_storage``). After a
    forward on the CPU bitsandbytes 0.50 saves magnitudes in bfloat16 as ``[k / block, n]``, and
    nested ones with the type to which they are rounded whenever they are computed.

    Args:
        state: the part that holds the settings, as JSON in bytes.
    """

    def __init__(self, parts: Parts, state: str) -> None:
        self.parts = parts
        settings = _settings(parts, state)
        n, k = settings.integers("shape", 2, 1, _MOST_ROWS)
        self.shape = (n, k)
        self._block = settings.integer("blocksize", 1, _MOST_IN_BLOCK)
        self._take_codes(-(-n * k // 2), (n, k // 2))
        parts.take(".weight.quant_map", _FLOAT, (16,))
        blocks = -(-n * k // self._block)
        self._nested = parts.has(".weight.nested_absmax")
        by_columns = (k // self._block, n) if k % self._block == 0 else (blocks,)
        if not self._nested:
            parts.take(".weight.absmax", FLOATS, (blocks,), by_columns)
        else:
            parts.take(".weight.absmax", _BYTE, (blocks,))
            self._nested_block = settings.integer("nested_blocksize", 1, _MOST_IN_BLOCK)
            self._offset = settings.number("nested_offset", -1e30, 1e30)
            self._nested_type = _nested_type(parts, state, settings)
            parts.take(".weight.nested_absmax", _FLOAT, (-(-blocks // self._nested_block),))
            parts.take(".weight.nested_quant_map", _FLOAT, (256,))
        self.kind = f"bitsandbytes {state.rpartition('__')[2]}, blocks of {self._block}"

    def _take_codes(self, count: int, matrix: tuple[int, int]) -> None:
        numbers = count // self.parts[".weight"].dtype.itemsize
        shapes = (numbers, 1), (1, numbers)
        stored = self.parts.take(".weight", (*_BYTE, *FLOATS), *shapes, matrix)
        if stored.nbytes != count:
            raise self.parts.error(".weight", f"has {stored.nbytes} bytes", f"of {count} bytes")

    def floats(self, first: int, last: int) -> Array:
        parts, k = self.parts, self.shape[1]
        start, end = first * k, last * k
        data = as_bytes(parts[".weight"]).reshape(-1)[start // 2 : -(-end // 2)]
        swapped = (data << 4) | (data >> 4)
        codes = unpack_nibbles(swapped)[start % 2 :][: end - start]
        values = looked_up(parts[".weight.quant_map"], codes)
        blocks = np.arange(start // self._block, -(-end // self._block))
        scale = np.repeat(self._scales(blocks), self._block)
        values *= scale[start % self._block :][: end - start]
        return values.reshape(-1, k)

    def _scales(self, blocks: Array) -> Array:
        """The largest magnitude of each block."""
        parts = self.parts
        stored = parts[".weight.absmax"]
        by_columns = (blocks % len(stored), blocks // len(stored))
        scale = stored[by_columns if stored.ndim == 2 else blocks]
        if self._nested:
            table, outer = (parts[part] for part in reversed(_NESTED))
            scale = looked_up(table, scale) * outer[blocks // self._nested_block]
            scale = floats(scale.astype(self._nested_type)) + np.float32(self._offset)
            scale = scale.astype(self._nested_type)
        return parts.finite(".weight.absmax", scale)


def _nested_type(parts: Parts, state: str, settings: Fields) -> np.dtype[Any]:
    """To which magnitudes are rounded; it was not said of old."""
    said = settings.text("nested_dtype") if settings.says("nested_dtype") else "float32"
    return supported(f"{parts.name(state)} with nested_dtype =", said, _TYPES)


def _settings(parts: Parts, state: str) -> Fields:
    """The JSON object that lies in the bytes of a tensor."""
    name = parts.name(state)
    data = parts.take(state, _BYTE, (None,))
    try:
        settings = json.loads(bytes(data[:_STATE_BYTES]))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"tensor {name} is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ModelLoadError(f"tensor {name} must hold a JSON object")
    return Fields(settings, where=f"{name}: ")
