"""Quantised weights as the blocks that the linears compute with. Knows no checkpoint.

The integers and scales stay as they are: nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.tensors.arrays import Array, as_bytes, floats
from paceline.tensors.blocks import FORMATS, FP4_VALUES
from paceline.tensors.stored import StoredRows


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Weights ``[n, k]`` as integers and scales.

    Weight ``(row, order[j])`` is ``scale[row, g] * (code[row, j] - zero[row, g])``, where ``g`` is
    ``j // group``; with a table, ``table[code[row, j]]`` stands in place of the difference.

    Attributes:
        bits: of a code, 4 or 8.
        code: uint8 ``[n, k]``; codes that are stored as signed are shifted, and ``zero`` with them.
        scale: float32 ``[n, k / group]``.
        zero: uint8 ``[n, k / group]``; zeros where there is a table.
        group: inputs that share a scale.
        order: int64 ``[k]``, which input each column is of; None where they are in their order.
        table: int8 ``[16]``, what each code stands for; None where it stands for itself.
    """

    bits: int
    code: Array
    scale: Array
    zero: Array
    group: int
    order: Array | None = None
    table: Array | None = None


def blocks_of(codes: Codes) -> StoredRows | None:
    """The codes in a format that holds them, their inputs in the same order; None without one."""
    if codes.code.shape[1] % 32:
        return None
    if codes.table is not None:
        return _fp4(codes) if codes.table.tolist() == list(FP4_VALUES) else None
    if codes.group % 32:
        return None
    inputs = 128 if codes.group % 128 == 0 else 32
    if codes.bits == 8 and bool((codes.zero == 128).all()):
        form = f"C8_{inputs}"
        scale = _floats(_spread(codes.scale, codes, form))
        return _stored(codes, form, [scale, codes.code ^ 128])
    form = f"Z{codes.bits}_{inputs}"
    head = [_floats(_spread(codes.scale, codes, form)), _spread(codes.zero, codes, form)]
    return _stored(codes, form, [*head, codes.code if codes.bits == 8 else _nibbles(codes.code)])


def fp8_blocks(value: Array, scale: Array, block: tuple[int, int]) -> StoredRows | None:
    """The same of 8-bit floats, a scale for 128 inputs at a time.

    Args:
        value: float8_e4m3fn ``[n, k]``.
        scale: float32, one for each block; blocks at the ends may be cut off.
        block: rows and inputs that share a scale.
    """
    (high, wide), (n, k) = block, value.shape
    if wide % 128 and wide < k:
        return None
    units = -(-k // 128)
    scale = scale[np.arange(n) // high][:, np.arange(units) * 128 // wide]
    codes = np.pad(as_bytes(value), ((0, 0), (0, units * 128 - k)))
    parts = [_floats(scale).reshape(n, units, 4), codes.reshape(n, units, 128)]
    return StoredRows("F8_128", np.concatenate(parts, axis=2).reshape(n, -1))


def _fp4(codes: Codes) -> StoredRows | None:
    """MXFP4 where the scales are powers of two for 32 inputs each; otherwise for 16 each."""
    mantissa, exponent = np.frexp(codes.scale)
    if codes.group == 32 and bool(((mantissa == 0.5) & (exponent > -128)).all()):
        powers = (exponent + 127).astype(np.uint8)
        return _stored(codes, "MXFP4", [powers, _nibbles(codes.code)])
    if codes.group != 16:
        return None
    return _stored(codes, "F4_16", [_floats(codes.scale), _nibbles(codes.code)])


def _spread(values: Array, codes: Codes, form: str) -> Array:
    """A value per group as a value per block, ``[n, blocks]``."""
    return np.repeat(values, codes.group // FORMATS[form].inputs, axis=1)


def _floats(values: Array) -> Array:
    return as_bytes(floats(values))


def _nibbles(code: Array) -> Array:
    """Of 32 inputs each the first 16 in the low nibbles, the others in the high ones."""
    halves = code.reshape(len(code), -1, 2, 16)
    nibbles: Array = halves[:, :, 0] | halves[:, :, 1] << 4
    return nibbles.reshape(len(code), -1)


def _stored(codes: Codes, form: str, parts: list[Array]) -> StoredRows:
    """Rows of blocks out of parts ``[n, blocks * bytes]``, in the order of the codes."""
    n = len(parts[0])
    blocks = sum(part.shape[1] for part in parts) // FORMATS[form].num_bytes
    rows = np.concatenate([part.reshape(n, blocks, -1) for part in parts], axis=2).reshape(n, -1)
    return StoredRows(form, rows, None if codes.order is None else codes.order.astype(np.int32))
