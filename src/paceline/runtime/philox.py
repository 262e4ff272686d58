"""The sampling noise: Philox4x32-10, counter based, so that it has no state to keep or to lose.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Knows no logits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def philox(key: U64, c0: U64, c1: U64, c2: U64, c3: U64) -> tuple[U64, U64, U64, U64]:
    """Four 32-bit words per counter, as uint64 arrays.

    Args:
        key: 64-bit keys, low word first, ``[n]``.
        c0, c1, c2, c3: the words of the counters, ``[n]`` each, below 2**32.
    """
    k0, k1 = key & _LOW, key >> _SHIFT
    c0, c1, c2, c3 = c0.copy(), c1.copy(), c2.copy(), c3.copy()
    for turn in range(_ROUNDS):
        c0 *= _M0  # now the products: high word left, low word right
        c2 *= _M1
        c1 ^= c2 >> _SHIFT
        c1 ^= (k0 + np.uint64(turn * _W0)) & _LOW
        c3 ^= c0 >> _SHIFT
        c3 ^= (k1 + np.uint64(turn * _W1)) & _LOW
        c2 &= _LOW
        c0 &= _LOW
        c0, c1, c2, c3 = c1, c2, c3, c0
    return c0, c1, c2, c3


def token_noise(
    seeds: U64,
    positions: U64,
    sample_indices: U64,
    rows: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise of (row, token) pairs.

    Args:
        seeds, positions, sample_indices: one entry per row.
        rows, token_ids: the pairs, sorted by row and then by token.

    Returns:
        ``-log(-log(u))`` in float64, ``[pairs]``.
    """
    blocks = token_ids >> 2
    first = np.empty(len(rows), dtype=bool)
    first[:1] = True
    np.not_equal(blocks[1:], blocks[:-1], out=first[1:])
    first[1:] |= rows[1:] != rows[:-1]
    owner = rows[first]
    words = philox(
        seeds[owner],
        positions[owner],
        blocks[first].astype(np.uint64),
        sample_indices[owner],
        np.zeros(len(owner), dtype=np.uint64),
    )
    x = np.stack(words)[token_ids & 3, np.cumsum(first) - 1]
    u = (x.astype(np.float64) + 0.5) * 2.0**-32
    noise: npt.NDArray[np.float64] = -np.log(-np.log(u))
    return noise
