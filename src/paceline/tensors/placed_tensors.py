"""Tensors that are parts of a checkpoint's: some of its rows, a transpose, or one of a stack.

Owns how a part is taken, in floats and as bytes; which parts there are, subclasses know.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.core.errors import ModelLoadError
from paceline.tensors.arrays import Array, as_bytes
from paceline.tensors.blocks import FLOAT_BYTES, FORMATS, decode
from paceline.tensors.stored import FilePart, StoredRows, StoredTensors


class Place(NamedTuple):
    """Where a tensor lies.

    Attributes:
        stored: the checkpoint's name of what it lies in.
        rows: which of its rows, in the order in which they are wanted; None: all.
        total: rows that there must be, or matrices of a stack.
        matrix: which one of a stack; None where it lies in none.
        transposed: whether it lies as its transpose.
    """

    stored: str
    rows: Array | slice | None = None
    total: int = 0
    matrix: int | None = None
    transposed: bool = False


class PlacedTensors(StoredTensors):
    """A checkpoint in which each part that a decoder reads is a tensor of its own.

    Subclasses fill ``_where``; a name that is not in it is looked up as it is, which says so where
    there is no such tensor.
    """

    _where: dict[str, Place]

    def __init__(self, stored: StoredTensors) -> None:
        self.stored = stored
        self._unpacked: tuple[str, Array] | None = None
        self._where = {}

    def _place(self, name: str) -> Place:
        return self._where.get(name, Place(name))

    def __getitem__(self, name: str) -> Array:
        place = self._place(name)
        if self._unpacked is None or self._unpacked[0] != place.stored:
            self._unpacked = place.stored, self.stored[place.stored]
        found = _picked(place, self._unpacked[1])
        return np.ascontiguousarray(found.T) if place.transposed else found

    def rows(self, name: str, first: int, last: int) -> Array:
        place = self._place(name)
        if place.rows is None and place.matrix is None:
            return self.stored.rows(place.stored, first, last)
        blocks = None if place.transposed else self.as_stored(name)
        if blocks is None or blocks.format not in FORMATS or blocks.order is not None:
            return self[name][first:last]
        # A stack of experts may have more weights than there is memory for as floats.
        found: Array = decode(blocks.format, blocks.rows[first:last]).floats()
        return found[:, : self.shape_of(name)[1]]

    def as_stored(self, name: str) -> StoredRows | None:
        place = self._place(name)
        if place.transposed:
            kind = self.type_of(name)
            return StoredRows(kind, as_bytes(self[name])) if kind in FLOAT_BYTES else None
        found = self.stored.as_stored(place.stored)
        return found and found._replace(rows=_picked(place, found.rows))

    def shape_of(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        shape = self.stored.shape_of(place.stored)
        if place.matrix is not None:
            return shape[1:]
        if place.rows is not None:
            picked = place.rows
            count = picked.stop - picked.start if isinstance(picked, slice) else len(picked)
            shape = (count, *shape[1:])
        return shape[::-1] if place.transposed else shape

    def file_part(self, name: str) -> FilePart | None:
        place = self._place(name)
        is_whole = place.rows is None and place.matrix is None and not place.transposed
        return self.stored.file_part(place.stored) if is_whole else None

    def type_of(self, name: str) -> str:
        return self.stored.type_of(self._place(name).stored)

    def num_bytes(self) -> int:
        return self.stored.num_bytes()

    def release(self, name: str) -> None:
        self._unpacked = None
        self.stored.release(self._place(name).stored)


def _picked(place: Place, rows: Array) -> Array:
    if place.matrix is not None:
        if rows.ndim != 3 or len(rows) != place.total:
            raise ModelLoadError(
                f"tensor {place.stored} has shape {rows.shape}; the configuration needs a "
                f"stack of {place.total} matrices"
            )
        one: Array = rows[place.matrix]
        return one
    if place.rows is None:
        return rows
    if not rows.ndim or len(rows) != place.total:
        raise ModelLoadError(
            f"tensor {place.stored} has shape {rows.shape}; the configuration needs "
            f"{place.total} rows"
        )
    found: Array = rows[place.rows]
    return found
