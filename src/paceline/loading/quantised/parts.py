"""The stored tensors of one quantised linear, and what is said of it in ``quantization_config``.

Both are untrusted. Owns how they are checked; knows no format. Nothing is copied here: a tensor is
a view of its file until somebody computes with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ModelLoadError
from paceline.tensors.arrays import BFLOAT16, Array, Floats, floats
from paceline.tensors.stored import StoredTensors

Shape = tuple[int | None, ...]
"""Sizes, where None stands for any but 0."""

FLOATS: tuple[np.dtype[Any], ...] = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors whose names begin with ``linear``, such as ``model.layers.0.mlp.up_proj``."""

    tensors: StoredTensors
    linear: str

    def name(self, part: str) -> str:
        """What a part is called in the checkpoint; ``part`` begins with its dot."""
        return self.linear + part

    def has(self, part: str) -> bool:
        return self.name(part) in self.tensors

    def __getitem__(self, part: str) -> Array:
        """A tensor whose type and shape were checked before; ``ModelLoadError`` without it."""
        return self.tensors[self.name(part)]

    def take(self, part: str, types: Collection[npt.DTypeLike], *shapes: Shape) -> Array:
        """A tensor of one of the types and shapes; ``ModelLoadError`` where there is none."""
        tensor = self[part]
        if tensor.dtype not in types:
            wanted = " or ".join(str(np.dtype(kind)) for kind in types)
            raise self.error(part, f"is of type {self.tensors.type_of(self.name(part))}", wanted)
        found = tuple(tensor.shape)
        if not any(_fits(found, shape) for shape in shapes):
            raise self.error(part, f"has shape {found}", " or ".join(map(_told, shapes)))
        return tensor

    def finite(self, part: str, values: Array) -> Floats:
        """Scales read from a part, as float32; ``ModelLoadError`` where one is not finite."""
        values = floats(values)
        if not np.isfinite(values).all():
            raise self.error(part, "holds a scale that is infinite or not a number", "finite")
        return values

    def error(self, part: str, found: str, wanted: str) -> ModelLoadError:
        return ModelLoadError(
            f"tensor {self.name(part)} {found}; as a part of a quantised weight it must be {wanted}"
        )


def _fits(found: tuple[int, ...], shape: Shape) -> bool:
    return len(found) == len(shape) and all(
        (size >= 1 if want is None else size == want)
        for size, want in zip(found, shape, strict=True)
    )


def _told(shape: Shape) -> str:
    sizes = ["any" if size is None else str(size) for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def as_object(value: object) -> Mapping[str, Any]:
    """The value where it is an object, otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}


def block_size(said: object, key: str) -> tuple[int, int]:
    """Rows and inputs of a block, from two whole numbers in a list or written as ``128x128``."""
    values = said.split("x") if isinstance(said, str) else said
    if isinstance(values, list | tuple) and len(values) == 2:
        high, wide = (int(v) if str(v).isdecimal() and len(str(v)) < 8 else 0 for v in values)
        if high and wide:
            return high, wide
    raise ModelLoadError(
        f"the model configuration says {key} = {str(said)[:40]}; it must be two whole numbers, "
        "both at least 1"
    )
