"""Small integers out of the words that they are packed into, lowest bits first. Knows no format."""

from __future__ import annotations

import torch


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
