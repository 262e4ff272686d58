"""Arrays in host memory, in every type that weights are stored in. Knows no file and no model.

numpy has neither bfloat16 nor floats of 8 bits; the package ml_dtypes adds them to it.
"""

from __future__ import annotations

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
