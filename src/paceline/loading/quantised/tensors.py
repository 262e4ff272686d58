"""A quantised checkpoint's tensors as if its linears were plain. Knows no format of them.

A linear is under its Hugging Face name, ``NAME.weight``, unpacked when it is looked up. The tensors
that it is made of are not listed, and neither are the scales of activations, keys and values, which
are computed with unquantised.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from paceline.core.errors import ModelLoadError
from paceline.loading.quantised.parts import Parts
from paceline.loading.quantised.weight import QuantisedWeight, Scheme
from paceline.models.tensor_checks import is_harmless
from paceline.tensors.arrays import Array
from paceline.tensors.stored import StoredRows, StoredTensors

_WEIGHT = ".weight"
AT_ONCE = 1 << 22  # weights that are unpacked in one go
_OF_ACTIVATIONS = re.compile(
    r".*\.(((input|output|activation|prob|[qkv])_(scale|zero_point|global_scale))|input_scale_ub)"
)


class QuantisedTensors(StoredTensors):
    """Lazy mapping from Hugging Face names to tensors, quantised weights as float32.

    Attributes:
        stored: the checkpoint as it lies in its files.
        schemes: of its linears.

    Raises:
        ModelLoadError: the tensors of a linear do not fit together; on lookup: there is no such
            tensor, or its scales are no numbers.
    """

    def __init__(self, stored: StoredTensors, schemes: Sequence[Scheme]) -> None:
        self.stored, self.schemes = stored, schemes
        found: dict[str, QuantisedWeight] = {}
        hidden: set[str] = set()
        self._parts: dict[str, list[str]] = {}  # of each quantised weight
        needed = [name for name in stored if not is_harmless(name)]
        for scheme in schemes:
            for name in needed:
                if name.endswith(scheme.marker) and name not in hidden:
                    linear = name.removesuffix(scheme.marker)
                    found[linear + _WEIGHT] = scheme.open(Parts(stored, linear))
                    names = [linear + part for part in scheme.parts]
                    self._parts[linear + _WEIGHT] = [part for part in names if part in stored]
                    hidden.update(names)
        plain = [n for n in stored if n not in hidden and not _OF_ACTIVATIONS.fullmatch(n)]
        twice = found.keys() & set(plain)
        if twice:
            raise ModelLoadError(f"{min(twice)} appears twice: plain and quantised")
        self._where = {**dict.fromkeys(plain), **found}

    def _weight(self, name: str) -> QuantisedWeight | None:
        """The weight, where it is quantised."""
        if name not in self._where:
            raise ModelLoadError(f"the checkpoint has no tensor {name}")
        found: QuantisedWeight | None = self._where[name]
        return found

    def __getitem__(self, name: str) -> Array:
        weight = self._weight(name)
        return self.stored[name] if weight is None else _unpacked(weight, 0, weight.shape[0])

    def rows(self, name: str, first: int, last: int) -> Array:
        weight = self._weight(name)
        if weight is None:
            return self.stored.rows(name, first, last)
        last = min(last, weight.shape[0])
        return _unpacked(weight, min(first, last), last)

    def as_stored(self, name: str) -> StoredRows | None:
        weight = self._where.get(name)
        return self.stored.as_stored(name) if weight is None else weight.as_stored()

    def num_bytes(self) -> int:
        return self.stored.num_bytes()

    def type_of(self, name: str) -> str:
        weight = self._weight(name)
        return self.stored.type_of(name) if weight is None else weight.kind

    def shape_of(self, name: str) -> tuple[int, ...]:
        weight = self._weight(name)
        return self.stored.shape_of(name) if weight is None else weight.shape

    def release(self, name: str) -> None:
        for part in self._parts.get(name, [name]):
            self.stored.release(part)


def _unpacked(weight: QuantisedWeight, first: int, last: int) -> Array:
    """Rows ``first:last`` as floats, in slices: what they are unpacked from is larger."""
    k = weight.shape[1]
    found = np.empty((last - first, k), np.float32)
    step = max(1, AT_ONCE // k)
    for start in range(first, last, step):
        end = min(start + step, last)
        found[start - first : end - first] = weight.floats(start, end)
    return found
