"""Arrays in host memory, in every type that weights are stored in. Knows no file and no model.

numpy has neither bfloat16 nor floats of 8 bits; the package ml_dtypes adds them to it.

What lives as long as a model is in pages of the system's own (:class:`Arena`). The C library's
allocator would mix such arrays with the temporary ones of loading and keep the holes that those
leave. And its pages are of 4 KB: a step, which reads all weights, waits for the translation of
addresses, and takes 5 to 10 % longer where it has one row.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2: np.dtype[Any] = np.dtype(ml_dtypes.float8_e5m2)
FLOAT_NAMES = ("float64", "float32", "float16", "bfloat16")
"""Types that are numbers by themselves, without scales."""
STORED_FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": BFLOAT16,
    "F16": np.dtype(np.float16),
}
"""Of :data:`FLOAT_NAMES`, those that linears compute with as they are stored."""


def floats(array: Array) -> Floats:
    """As float32; what is so already is not copied."""
    if array.dtype == BFLOAT16:
        bits = np.ascontiguousarray(array).view(np.uint16)
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32, copy=False)


def as_bytes(array: Array) -> Bytes:
    """The bytes of a matrix's rows, ``[n, bytes of a row]``; copied only where rows have gaps."""
    return np.ascontiguousarray(array).view(np.uint8)


CACHE_LINE = 64
HUGE_PAGE = 2 << 20
MAP_BYTES = 64 * HUGE_PAGE


class Arena:
    """Cuts arrays out of large maps of huge pages, one after another.

    A map takes memory as its arrays are first written, and gives it back when all are gone.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | bytearray = bytearray()
        self._used = 0

    def zeros(self, count: int, dtype: npt.DTypeLike) -> Array:
        """Zeros ``[count]`` that begin on a cache line."""
        size = count * np.dtype(dtype).itemsize
        if self._used + size > len(self._map):
            self._map = _map(max(MAP_BYTES, -(-size // HUGE_PAGE) * HUGE_PAGE))
            _advise(self._map, "MADV_HUGEPAGE")
            self._used = 0
        array = np.frombuffer(self._map, dtype, count, self._used)
        self._used += -(-size // CACHE_LINE) * CACHE_LINE
        return array


def sparse_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Zeros that begin on a page and take memory in small pages, as they are first written.

    For KV caches: a block is a few kilobytes in each layer, and with huge pages a short context
    would take the memory of a long one.
    """
    count = math.prod(shape)
    pages = _map(max(1, count * np.dtype(dtype).itemsize))
    _advise(pages, "MADV_NOHUGEPAGE")
    return np.frombuffer(pages, dtype, count).reshape(shape)


def give_back_freed() -> None:
    """Return to the system what the C library holds of freed memory, where it can (glibc)."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _map(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows: not shared unless it has a name
        return mmap.mmap(-1, size)
    # Not reserved: most of it may never be written.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(-1, size, flags=flags)


def _advise(pages: mmap.mmap, advice: str) -> None:
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            pages.madvise(getattr(mmap, advice))
