"""Memory for what lives as long as a model, and how loading's own is given back. Knows no layout.

Between the temporary arrays of loading, the C library's allocator would keep the holes that those
leave; so weights and KV caches are pages of the system's own.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt


def mapped_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin on a page. They take memory page by page, when they are first written.

    Huge pages are declined: a block of a KV cache is a few kilobytes per layer, and with 2 MB
    for each a short context would take the memory of a long one.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        return np.zeros(shape, dtype)
    count = math.prod(shape)
    size = max(1, count * np.dtype(dtype).itemsize)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype, count).reshape(shape)


def give_back_freed() -> None:
    """Return to the system what the C library holds of freed memory, where it can (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library
        return
