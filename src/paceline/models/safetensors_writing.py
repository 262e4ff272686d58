"""Safetensors files whose tensors begin at whole cache lines. Knows no model.

The format wants its tensors one right after another, and does not say where the first one begins.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LINE = 64
_TYPES = {"uint8": "U8", "int32": "I32", "float32": "F32", "int64": "I64"}


def save_aligned(
    arrays: Mapping[str, npt.NDArray[Any]], path: Path, metadata: Mapping[str, str]
) -> None:
    """Write arrays under their names. What is a whole number of cache lines begins at such a line.

    The others come last, those of the largest elements first, so that elements are aligned.

    Raises:
        OSError: the file cannot be written.
    """
    names = sorted(arrays, key=lambda name: _place(arrays[name]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        array, begin = arrays[name], end
        end += array.nbytes
        header[name] = {
            "dtype": _TYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % LINE)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(np.ascontiguousarray(arrays[name]).data)


def _place(array: npt.NDArray[Any]) -> int:
    return 0 if array.nbytes % LINE == 0 else LINE - array.itemsize
