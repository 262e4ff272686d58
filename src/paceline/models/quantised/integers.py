"""Linears of integer weights as compressed-tensors and bitsandbytes store them.

Integers are signed here and shifted when they are read, so that codes count from 0.
"""

from __future__ import annotations

import torch

from paceline.errors import UnsupportedModelError
from paceline.models.quantised.parts import FLOATS, Parts
from paceline.models.quantised.unpacking import unpack_columns, unpack_words
from paceline.models.quantised.weight import CodedWeight, group_index, grouping

_WHOLE = (torch.int32, torch.int64)
_INT8 = (torch.int8,)


class PackedWeight(CodedWeight):
    """``weight_packed`` int32 ``[n, words]``: 4- or 8-bit codes packed along inputs.

    ``weight_shape`` says what the last word has of them. Zeros are packed along outputs, or plain
    int8 as older versions wrote them; without any, codes are symmetric about their middle.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        n, words = parts.take(".weight_packed", (torch.int32,), (None, None)).shape
        rows, k = parts.take(".weight_shape", _WHOLE, (2,)).tolist()
        fitting = [bits for bits in (4, 8) if k > 0 and -(-k * bits // 32) == words]
        if rows != n or k <= 0:
            raise parts.error(".weight_shape", f"says ({rows}, {k})", f"({n}, any)")
        if not fitting:
            raise UnsupportedModelError(
                f"{parts.name('.weight_packed')} has {words} words for {k} inputs, so it is "
                "damaged, or weights are not of 4 or 8 bits, which alone are supported"
            )
        self.bits = fitting[0]
        self.shape = (n, k)
        self.groups = _groups(parts, n)
        if self._has_index():
            parts.take(".weight_g_idx", _WHOLE, (k,))
        elif k % self.groups:
            raise parts.error(".weight_scale", f"has {self.groups} groups", f"a divisor of {k}")
        if parts.has(".weight_zero_point"):
            packed = parts[".weight_zero_point"].dtype == torch.int32
            shapes = [(-(-n * self.bits // 32), self.groups)]
            zeros = shapes if packed else _scale_shapes(n, self.groups)
            parts.take(".weight_zero_point", (torch.int32, torch.int8), *zeros)
        self.kind = f"compressed-tensors {self.bits}-bit, {grouping(k, self.groups)}"

    def _has_index(self) -> bool:
        part = ".weight_g_idx"
        if not self.parts.has(part):
            return False
        return bool((self.parts[part] != -1).any())  # all: not in use

    def index(self) -> torch.Tensor | None:
        if not self._has_index():
            return None
        return group_index(self.parts, ".weight_g_idx", self.shape[1], self.groups)

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts, (n, k) = self.parts, self.shape
        words = parts[".weight_packed"][first:last]
        code = unpack_words(words, self.bits)[:, :k].contiguous()
        scale = _scale(parts, ".weight_scale", first, last, n)
        middle = 1 << (self.bits - 1)
        if not parts.has(".weight_zero_point"):
            return code, scale, torch.full(scale.shape, middle, dtype=torch.uint8)
        zeros = parts[".weight_zero_point"]
        if zeros.dtype == torch.int8:
            if zeros.min() < -middle or zeros.max() >= middle:
                limits = f"from {-middle} to {middle - 1}"
                raise parts.error(".weight_zero_point", "holds a zero out of range", limits)
            return code, scale, _shifted(_by_row(zeros, n)[first:last], middle)
        return code, scale, unpack_columns(zeros.t(), self.bits, first, last).t()


class Int8Weight(CodedWeight):
    """``weight`` int8 ``[n, k]`` and its scale: one, one a row, or one a group.

    Args:
        scale: the part that holds the scales.
        zero: the part that may hold zeros, in the same shape; none where it is empty.
        factor: what scales are multiplied by.
        made_by: whose format it is, for the user.
    """

    bits = 8

    def __init__(
        self, parts: Parts, scale: str, zero: str = "", factor: float = 1.0, made_by: str = ""
    ) -> None:
        self.parts = parts
        n, k = parts.take(".weight", _INT8, (None, None)).shape
        self.shape = (n, k)
        self._scale, self._zero, self._factor = scale, zero, factor
        self.groups = _groups(parts, n, scale)
        if k % self.groups:
            raise parts.error(scale, f"has {self.groups} groups", f"a divisor of {k} inputs")
        if zero and parts.has(zero):
            parts.take(zero, _INT8, *_scale_shapes(n, self.groups))
        self.kind = f"{made_by} 8-bit, {grouping(k, self.groups)}"

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts, n = self.parts, self.shape[0]
        code = _shifted(parts[".weight"][first:last], 128)
        scale = _scale(parts, self._scale, first, last, n) * self._factor
        if not (self._zero and parts.has(self._zero)):
            return code, scale, torch.full(scale.shape, 128, dtype=torch.uint8)
        zeros = _by_row(parts[self._zero], n)[first:last]
        return code, scale, _shifted(zeros, 128)


def _shifted(signed: torch.Tensor, middle: int) -> torch.Tensor:
    """Signed integers from ``-middle`` on as unsigned ones from 0 on."""
    return (signed.short() + middle).to(torch.uint8)


def _groups(parts: Parts, n: int, scale: str = ".weight_scale") -> int:
    """Scales of a row, after their shape was checked."""
    found = parts.take(scale, FLOATS, (n, None), (n,), (1,), (1, 1), ())
    return found.shape[1] if found.dim() == 2 else 1


def _scale_shapes(n: int, groups: int) -> list[tuple[int, ...]]:
    return [(n, groups), *([(n,), (1,), (1, 1), ()] if groups == 1 else [])]


def _scale(parts: Parts, part: str, first: int, last: int, n: int) -> torch.Tensor:
    scale = _by_row(parts[part], n)[first:last]
    return parts.finite(part, scale)


def _by_row(values: torch.Tensor, n: int) -> torch.Tensor:
    """What is stored for all weights, or for each row, as ``[n, ...]``."""
    values = values.reshape(-1, 1) if values.dim() < 2 else values
    return values.expand(n, -1) if len(values) == 1 else values
