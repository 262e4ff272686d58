"""Small integers out of the words that they are packed into, and scales out of bytes.

Knows no format.
"""

from __future__ import annotations

import numpy as np

from paceline.loading.quantised.parts import Parts
from paceline.tensors.arrays import Array


def unpack_words(words: Array, bits: int) -> Array:
    """Codes of 4 or 8 bits, uint8 ``[..., w * 32 / bits]``, out of int32 ``[..., w]``."""
    data = np.ascontiguousarray(words).view(np.uint8)
    return data if bits == 8 else unpack_nibbles(data)


def unpack_nibbles(data: Array) -> Array:
    """Codes of 4 bits, uint8 ``[..., 2 * b]``, out of bytes ``[..., b]``, the low half first."""
    halves = np.stack((data & 15, data >> 4), -1)
    return halves.reshape(*data.shape[:-1], -1)


def unpack_columns(
    words: Array, bits: int, first: int, last: int, places: Array | None = None
) -> Array:
    """Columns ``first:last`` of what int32 ``[m, w]`` hold, without unpacking the others.

    Args:
        places: where within its word each column lies, if not one after the other.
    """
    each = 32 // bits
    start = first // each
    codes = unpack_words(words[:, start : -(-last // each)], bits)
    if places is not None:
        codes = codes.reshape(len(words), -1, each)[:, :, places].reshape(len(words), -1)
    return codes[:, first - start * each : last - start * each]


_NO_NUMBER = 255


def powers_of_two(parts: Parts, part: str, exponents: Array, lower: int = 0) -> Array:
    """``2 ** (exponent - 127 - lower)``, float32 and exact; ``ModelLoadError`` for 255, a NaN."""
    if (exponents == _NO_NUMBER).any():
        raise parts.error(part, "holds a scale that is not a number", "below 255 throughout")
    return np.asarray(np.ldexp(np.float32(1.0), exponents.astype(np.int32) - 127 - lower))


def looked_up(table: Array, code: Array) -> Array:
    """``table[code]`` as float32."""
    return np.take(table.astype(np.float32), code)
