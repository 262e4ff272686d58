"""What each quantised format makes of one linear's tensors. Owns the interface, no format.

A kernel can compute with two forms as they are: integers with scales, and 8-bit floats with scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.models.quantised.parts import Parts

Tensor = torch.Tensor
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Weights ``[n, k]`` as integers and scales.

    Weight ``(row, order[j])`` is ``scale[row, g] * (code[row, j] - zero[row, g])``, where ``g`` is
    ``j // group``; with a table, ``table[code[row, j]]`` stands in place of the difference.

    Attributes:
        bits: of a code, 4 or 8.
        code: uint8 ``[n, k]``; codes that are stored as signed are shifted, and ``zero`` with them.
        scale: float32 ``[n, k / group]``.
        zero: uint8 ``[n, k / group]``; zeros where there is a table.
        group: inputs that share a scale.
        order: int64 ``[k]``, which input each column is of; None where they are in their order.
        table: int8 ``[16]``, what each code stands for; None where it stands for itself.
    """

    bits: int
    code: Tensor
    scale: Tensor
    zero: Tensor
    group: int
    order: Tensor | None = None
    table: Tensor | None = None

    def floats(self) -> Tensor:
        """The weights in float32 ``[n, k]``, their inputs in order."""
        n, k = self.code.shape
        values = differences(self.code.view(n, -1, self.group), self.zero[..., None], self.table)
        weights = values.mul_(self.scale[..., None]).view(n, k)
        if self.order is None:
            return weights
        placed = torch.empty_like(weights)
        placed[:, self.order] = weights
        return placed


def differences(code: Tensor, zero: Tensor, table: Tensor | None) -> Tensor:
    """What the codes stand for before they are scaled, float32, in memory of its own."""
    if table is not None:
        return looked_up(table.float(), code)
    return code.float().sub_(zero)


def looked_up(table: Tensor, code: Tensor) -> Tensor:
    """``table[code]``, several times as fast as by indexing with a tensor."""
    return table.index_select(0, code.flatten().int()).view(code.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8:
    """Weights ``[n, k]`` as 8-bit floats and scales.

    Weight ``(row, j)`` is ``value[row, j] * scale[row // block[0], j // block[1]]``.

    Attributes:
        value: float8_e4m3fn ``[n, k]``.
        scale: float32, one for each block; blocks at the ends may be cut off.
        block: rows and inputs that share a scale.
    """

    value: Tensor
    scale: Tensor
    block: tuple[int, int]

    def floats(self, first: int, last: int) -> Tensor:
        """Rows ``first:last`` of the weights in float32."""
        high, wide = self.block
        scale = self.scale.index_select(0, torch.arange(first, last) // high)
        columns = torch.arange(self.value.shape[1]) // wide
        values = looked_up(_E4M3, self.value[first:last].view(torch.uint8))
        return values.mul_(scale.index_select(1, columns))


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
    def floats(self, first: int, last: int) -> Tensor:
        """Rows ``first:last`` in float32, by the format's definition."""

    def codes(self) -> Codes | None:
        """All weights as integers, where the format has them."""
        return None

    def fp8(self) -> Fp8 | None:
        """All weights as 8-bit floats, where the format has them."""
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
    table: Tensor | None = None

    @abstractmethod
    def read(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows ``first:last``: codes ``[rows, k]``, scales and zeros ``[rows, groups]``."""

    def index(self) -> Tensor | None:
        """The group of each input, int64 ``[k]``; None where groups follow one another."""
        return None

    def floats(self, first: int, last: int) -> Tensor:
        index = self.index()
        code, scale, zero = self.read(first, last)
        if index is None:
            return self._codes(code, scale, zero, None).floats()
        zero, scale = (part.float().index_select(1, index) for part in (zero, scale))
        return differences(code, zero, self.table).mul_(scale)

    def codes(self) -> Codes | None:
        index = self.index()
        if index is None:
            return self._codes(*self.read(0, self.shape[0]), None)
        sizes = torch.bincount(index, minlength=self.groups)
        if self.shape[1] % self.groups or (sizes != self.shape[1] // self.groups).any():
            return None  # groups of different sizes
        order = torch.argsort(index, stable=True)
        code, scale, zero = self.read(0, self.shape[0])
        return self._codes(code.index_select(1, order), scale, zero, order)

    def _codes(self, code: Tensor, scale: Tensor, zero: Tensor, order: Tensor | None) -> Codes:
        group = self.shape[1] // self.groups
        return Codes(self.bits, code, scale, zero, group, order, self.table)


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


def _consecutive(index: Tensor, groups: int) -> bool:
    """Whether every group has as many inputs, one group after the other."""
    k = len(index)
    return k % groups == 0 and bool((index == torch.arange(k) // (k // groups)).all())


def group_index(parts: Parts, part: str, k: int, groups: int) -> Tensor | None:
    """The group of each input out of a stored ``g_idx``; None where groups follow one another.

    Raises:
        ModelLoadError: it is of another type or size, or names a group that is not there.
    """
    index = parts.take(part, (torch.int32, torch.int64), (k,)).long()
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise parts.error(part, "names a group that has no scale", f"from 0 to {groups - 1}")
    return None if _consecutive(index, groups) else index
