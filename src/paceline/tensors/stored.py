"""A checkpoint's tensors under their Hugging Face names, and how they lie in its files.

Owns what a source of weights may offer beyond a look-up, and how a part of a tensor is taken (some
of its rows or columns, a transpose, one of a stack) in floats and as bytes. Knows no arithmetic.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from paceline.core.errors import ModelLoadError
from paceline.tensors.arrays import Array, as_bytes
from paceline.tensors.placement import Placement
from paceline.tensors.quantised_blocks import FLOAT_BYTES

PAGE = mmap.PAGESIZE


class StoredRows(NamedTuple):
    """A matrix ``[n, k]`` as bytes.

    Attributes:
        format: a name that :func:`paceline.tensors.quantised_blocks.row_bytes` knows.
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
        source: what is said to lack a tensor that is not there.
        in_use: while this lives, what is stored is not removed; None where nothing says so.
        stream: brings what does not stay in memory (:mod:`paceline.disk.streaming`); None where
            everything stays.
        placement: which tensors these are; None where everything stays.
    """

    _where: dict[str, Any]
    source: str = "the checkpoint"
    in_use: object = None
    stream: Any = None
    placement: Placement | None = None

    def _at(self, name: str) -> Any:
        """The entry of a tensor in ``_where``; ``ModelLoadError`` where there is no such tensor."""
        if name not in self._where:
            raise ModelLoadError(f"{self.source} has no tensor {name}")
        return self._where[name]

    def only(self, names: Iterable[str]) -> Self:
        """The same without the other tensors."""
        kept = copy.copy(self)
        kept._where = {name: self._where[name] for name in names}
        return kept

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


def drop_pages(source: mmap.mmap, start: int, end: int) -> None:
    """Give back the memory of whole pages within bytes ``start:end`` that nobody wrote to."""
    first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
    if first < last and hasattr(source, "madvise"):
        source.madvise(mmap.MADV_DONTNEED, first, last - first)


class Place(NamedTuple):
    """Where a tensor lies: what is picked of a stored one, in the order of these fields.

    Attributes:
        stored: the checkpoint's name of what it lies in.
        matrix: which one of a stack; None where it lies in none.
        rows, columns: which ones, in the order in which they are wanted; None: all.
        transposed: whether what was picked is the tensor's transpose.
        total: matrices or rows that the stored tensor must have; 0: any number.
    """

    stored: str
    matrix: int | None = None
    rows: Array | slice | None = None
    columns: Array | slice | None = None
    transposed: bool = False
    total: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it is the stored tensor as it is."""
        picks = (self.matrix, self.rows, self.columns)
        return not self.transposed and all(pick is None for pick in picks)


class PlacedTensors(StoredTensors):
    """A checkpoint in which each part that a decoder reads is a tensor of its own.

    Args:
        stored: the checkpoint.
        where: the place there of each tensor.
    """

    _where: dict[str, Place]

    def __init__(self, stored: StoredTensors, where: Mapping[str, Place]) -> None:
        self.stored, self.source, self._where = stored, stored.source, dict(where)
        self._unpacked: tuple[str, Array] | None = None

    def _checked(self, name: str) -> Place:
        place: Place = self._at(name)
        if place.total:
            count = (*self.stored.shape_of(place.stored), 0)[0]
            if count != place.total:
                raise ModelLoadError(
                    f"tensor {place.stored} has {count} "
                    f"{'rows' if place.matrix is None else 'matrices'}; the configuration needs "
                    f"{place.total}"
                )
        return place

    def __getitem__(self, name: str) -> Array:
        place = self._checked(name)
        picked: Array = self._stored(place)
        if place.rows is not None:
            picked = picked[place.rows]
        if place.columns is None and not place.transposed:
            return picked
        picked = picked if place.columns is None else picked[:, place.columns]
        return np.ascontiguousarray(picked.T if place.transposed else picked)

    def _stored(self, place: Place) -> Array:
        """A matrix of a stack, or a whole tensor: one that several lie in is unpacked once."""
        if place.matrix is not None:
            matrix: Array = self.stored.rows(place.stored, place.matrix, place.matrix + 1)[0]
            return matrix
        if place.rows is None:
            return self.stored[place.stored]
        if self._unpacked is None or self._unpacked[0] != place.stored:
            self._unpacked = place.stored, self.stored[place.stored]
        return self._unpacked[1]

    def rows(self, name: str, first: int, last: int) -> Array:
        place = self._at(name)
        if place.is_whole:
            return self.stored.rows(place.stored, first, last)
        return self[name][first:last]

    def as_stored(self, name: str) -> StoredRows | None:
        place = self._checked(name)
        if place.transposed:
            form, is_stack = self.type_of(name), place.matrix is not None
            if is_stack or form not in FLOAT_BYTES:
                return None
            return StoredRows(form, as_bytes(self[name]))
        stored = self.stored.as_stored(place.stored)
        if stored is None:
            return None
        rows, order = stored.rows, stored.order
        rows = rows if place.matrix is None else rows[place.matrix]
        rows = rows if place.rows is None else rows[place.rows]
        if place.columns is not None:
            assert order is None
            assert isinstance(place.columns, np.ndarray)
            order = np.argsort(place.columns).astype(np.int32)
        return StoredRows(stored.format, rows, order)

    def shape_of(self, name: str) -> tuple[int, ...]:
        place = self._at(name)
        shape = self.stored.shape_of(place.stored)[0 if place.matrix is None else 1 :]
        shape = (*map(_count, shape, (place.rows, place.columns)), *shape[2:])
        return shape[::-1] if place.transposed else shape

    def file_part(self, name: str) -> FilePart | None:
        place = self._at(name)
        return self.stored.file_part(place.stored) if place.is_whole else None

    def type_of(self, name: str) -> str:
        return self.stored.type_of(self._at(name).stored)

    def num_bytes(self) -> int:
        return self.stored.only({place.stored for place in self._where.values()}).num_bytes()

    def release(self, name: str) -> None:
        self._unpacked = None
        self.stored.release(self._at(name).stored)


def _count(size: int, picked: Array | slice | None) -> int:
    """How many of so many rows or columns are picked."""
    if picked is None:
        return size
    return len(range(size)[picked]) if isinstance(picked, slice) else len(picked)


def renamed(stored: StoredTensors, names: Mapping[str, str]) -> PlacedTensors:
    """Some of a checkpoint's tensors under other names: new name -> name there."""
    return PlacedTensors(stored, {name: Place(there) for name, there in names.items()})
