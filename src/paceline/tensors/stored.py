"""A checkpoint's tensors under their Hugging Face names, and how they lie in its files.

Owns what a source of weights may offer beyond a lookup; knows no format and no arithmetic.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from paceline.core.errors import ModelLoadError
from paceline.tensors.arrays import Array
from paceline.tensors.placement import Placement

PAGE = mmap.PAGESIZE


class StoredRows(NamedTuple):
    """A matrix ``[n, k]`` as bytes.

    Attributes:
        format: a name that :func:`paceline.tensors.blocks.row_bytes` knows.
        rows: uint8 ``[n, bytes of a row]``.
        order: int32 ``[k]``, which input each column is of; None where they are in their order.
    """

    format: str
    rows: Array
    order: Array | None = None


class FilePart(NamedTuple):
    """Bytes of a file, one after another."""

    path: Path
    offset: int
    num_bytes: int


class StoredTensors(Mapping[str, Array]):
    """Lazy mapping, whose lookups raise ``ModelLoadError``. Subclasses fill ``_where``.

    Attributes:
        in_use: while this lives, what is stored is not removed; None where nothing says so.
        stream: brings what does not stay in memory (:mod:`paceline.disk.streaming`); None where
            everything stays.
        placement: which tensors these are; None where everything stays.
    """

    _where: dict[str, Any]
    in_use: object = None
    stream: Any = None
    placement: Placement | None = None

    def only(self, names: Iterable[str]) -> Self:
        """The same without the other tensors."""
        found = copy.copy(self)
        found._where = {name: self._where[name] for name in names}
        return found

    def type_of(self, name: str) -> str:
        """The stored type, by the format's own name."""
        raise NotImplementedError

    def as_stored(self, name: str) -> StoredRows | None:
        """A matrix ``[n, k]`` in the format in which it is stored; None for other formats.

        Its rows are in their Hugging Face order.
        """
        return None

    def num_bytes(self) -> int:
        """Of all tensors as they are stored."""
        return sum(self[name].nbytes for name in self)

    def file_part(self, name: str) -> FilePart | None:
        """Where the whole tensor lies as it is; None where it does not, or nobody knows."""
        return None

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def rows(self, name: str, first: int, last: int) -> Array:
        """Rows ``first:last`` of the embedding or the head, without unpacking the others."""
        return self[name][first:last]

    def release(self, name: str) -> None:
        """Let go of the pages through which a tensor was read; it can be read again."""

    # Mapping's own versions of these wait for a KeyError.
    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (this is `get`)


class RenamedTensors(StoredTensors):
    """Some of a checkpoint's tensors under other names.

    Args:
        tensors: the checkpoint.
        names: new name -> name there.
        swapped: a new name, of a matrix whose inputs' two halves change places; empty for none.
    """

    def __init__(self, tensors: StoredTensors, names: Mapping[str, str], swapped: str = "") -> None:
        self._tensors, self._where, self._swapped = tensors, dict(names), swapped

    def _name(self, name: str) -> str:
        if name not in self._where:
            raise ModelLoadError(f"there is no tensor for {name}")
        return str(self._where[name])

    def __getitem__(self, name: str) -> Array:
        tensor = self._tensors[self._name(name)]
        if name != self._swapped or tensor.ndim != 2:
            return tensor
        return np.roll(tensor, tensor.shape[1] // 2, axis=1)

    def type_of(self, name: str) -> str:
        return self._tensors.type_of(self._name(name))

    def as_stored(self, name: str) -> StoredRows | None:
        if name == self._swapped or name not in self._where:
            return None
        return self._tensors.as_stored(self._name(name))

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape_of(self._name(name))

    def rows(self, name: str, first: int, last: int) -> Array:
        if name == self._swapped:
            return self[name][first:last]
        return self._tensors.rows(self._name(name), first, last)

    def release(self, name: str) -> None:
        self._tensors.release(self._name(name))


def drop_pages(source: mmap.mmap, start: int, end: int) -> None:
    """Give back the memory of whole pages within bytes ``start:end`` that nobody wrote to."""
    first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
    if first < last and hasattr(source, "madvise"):
        source.madvise(mmap.MADV_DONTNEED, first, last - first)
