"""Small integers out of the words that they are packed into, and scales out of bytes.

Knows no format.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.models.quantised.parts import Parts


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 4 or 8 bits, uint8 ``[..., w * 32 / bits]``, out of int32 ``[..., w]``."""
    # A column by itself counts as contiguous whatever its stride, and then cannot be viewed.
    data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return data if bits == 8 else unpack_nibbles(data)


def unpack_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, uint8 ``[..., 2 * b]``, out of bytes ``[..., b]``, the low half first."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def unpack_columns(
    words: torch.Tensor, bits: int, first: int, last: int, places: torch.Tensor | None = None
) -> torch.Tensor:
    """Columns ``first:last`` of what int32 ``[m, w]`` hold, without unpacking the others.

    Args:
        places: where within its word each column lies, if not one after the other.
    """
    each = 32 // bits
    start = first // each
    codes = unpack_words(words[:, start : -(-last // each)], bits)
    if places is not None:
        codes = codes.view(len(words), -1, each).index_select(2, places).flatten(1)
    return codes[:, first - start * each : last - start * each]


_NO_NUMBER = 255


def powers_of_two(parts: Parts, part: str, exponents: torch.Tensor, lower: int = 0) -> torch.Tensor:
    """``2 ** (exponent - 127 - lower)``, float32 and exact.

    Raises:
        ModelLoadError: an exponent is 255, which stands for no number.
    """
    if (exponents == _NO_NUMBER).any():
        raise parts.error(part, "holds a scale that is no number", "below 255 throughout")
    found = np.ldexp(np.float32(1.0), exponents.numpy().astype(np.int32) - 127 - lower)
    return torch.from_numpy(np.asarray(found, np.float32))


def looked_up(table: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """``table[code]`` as float32, several times as fast as by indexing with a tensor."""
    return table.float().index_select(0, code.flatten().int()).view(code.shape)
