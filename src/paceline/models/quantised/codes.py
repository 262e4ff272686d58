"""Quantised weights in the two forms that a kernel can compute with as they are.

Owns what the forms mean; knows no checkpoint and how none of its formats packs them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
