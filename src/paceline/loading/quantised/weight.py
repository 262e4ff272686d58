"""What each quantised format makes of one linear's tensors. Owns the interface, no format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.loading.quantised.as_blocks import Codes, blocks_of
from paceline.loading.quantised.parts import Parts
from paceline.loading.quantised.unpacking import looked_up
from paceline.tensors.arrays import Array
from paceline.tensors.stored import StoredRows


class QuantisedWeight(ABC):
    """The weights ``[n, k]`` of a linear; sizes are checked when it is made, values when read.

    Attributes:
        parts: its tensors.
        shape: ``n`` outputs and ``k`` inputs.
        kind: the format, for the user.
    """

    parts: Parts
    shape: tuple[int, int]
    kind: str

    @abstractmethod
    def floats(self, first: int, last: int) -> Array:
        """Rows ``first:last`` in float32, by the format's definition."""

    def as_stored(self) -> StoredRows | None:
        """All weights in a format that linears compute with; None where none holds them."""
        return None


class CodedWeight(QuantisedWeight):
    """Weights that are integer codes with a scale for each group of inputs.

    Attributes:
        bits: of a code.
        groups: in a row.
        table: what each code stands for, as :class:`Codes` has it.
    """

    bits: int
    groups: int
    table: Array | None = None

    @abstractmethod
    def read(self, first: int, last: int) -> tuple[Array, Array, Array]:
        """Of rows ``first:last``: codes ``[rows, k]``, scales and zeros ``[rows, groups]``."""

    def index(self) -> Array | None:
        """The group of each input, int64 ``[k]``; None where groups follow one another."""
        return None

    def floats(self, first: int, last: int) -> Array:
        index = self.index()
        code, scale, zero = self.read(first, last)
        if index is None:  # a scale for as many inputs each, one after the other
            code = code.reshape(len(code), self.groups, -1)
            scale, zero = scale[..., None], zero[..., None]
        else:
            zero, scale = zero[:, index], scale[:, index]
        if self.table is None:
            values = code.astype(np.float32)
            values -= zero
        else:
            values = looked_up(self.table, code)
        values *= scale
        return values.reshape(last - first, -1)

    def as_stored(self) -> StoredRows | None:
        index, order, (n, k) = self.index(), None, self.shape
        code, scale, zero = self.read(0, n)
        if index is not None:
            sizes = np.bincount(index, minlength=self.groups)
            if k % self.groups or (sizes != k // self.groups).any():
                return None  # groups of different sizes
            order = np.argsort(index, kind="stable")
            code = code[:, order]
        return blocks_of(Codes(self.bits, code, scale, zero, k // self.groups, order, self.table))


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way in which a linear may lie in a checkpoint.

    Attributes:
        marker: how the name of the tensor ends that tells of it.
        parts: how the names of all tensors end that belong to the weight, the marker among them.
        open: makes the weight; raises :class:`ModelLoadError` where the tensors do not fit.
    """

    marker: str
    parts: tuple[str, ...]
    open: Callable[[Parts], QuantisedWeight]


def grouping(k: int, groups: int) -> str:
    """In words, how many of ``k`` inputs share a scale."""
    return "one scale a row" if groups == 1 else f"groups of {-(-k // groups)}"


def _consecutive(index: Array, groups: int) -> bool:
    """Whether every group has as many inputs, one group after the other."""
    k = len(index)
    return k % groups == 0 and bool((index == np.arange(k) // (k // groups)).all())


def group_index(parts: Parts, part: str, k: int, groups: int) -> Array | None:
    """The group of each input out of a stored ``g_idx``; None where groups follow one another.

    Raises:
        ModelLoadError: it is of another type or size, or names a group that is not there.
    """
    index = parts.take(part, (np.int32, np.int64), (k,)).astype(np.int64)
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise parts.error(part, "names a group that has no scale", f"from 0 to {groups - 1}")
    return None if _consecutive(index, groups) else index
