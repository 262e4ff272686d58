"""Linears as AWQ stores them (``gemm``): codes and zeros packed along outputs, interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import UnsupportedModelError
from paceline.models.quantised.parts import FLOATS, Parts
from paceline.models.quantised.unpacking import unpack_columns
from paceline.models.quantised.weight import CodedWeight, Scheme, grouping

_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # of each of 8 outputs within its word


def schemes(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    version = str(config.get("version") or "gemm").lower()
    bits = config.get("bits", config.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise UnsupportedModelError(
            f"AWQ checkpoints of version {version[:40]!r} with {str(bits)[:40]} bits are not "
            "supported; supported is 'gemm' with 4 bits"
        )
    return (Scheme(".qweight", (".qweight", ".qzeros", ".scales"), AwqWeight),)


class AwqWeight(CodedWeight):
    """``qweight`` ``[k, n / 8]``, ``qzeros`` ``[groups, n / 8]``, ``scales`` ``[groups, n]``."""

    bits = 4

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        k, words = parts.take(".qweight", (torch.int32,), (None, None)).shape
        n = words * 8
        self.groups = parts.take(".scales", FLOATS, (None, n)).shape[0]
        if k % self.groups:
            raise parts.error(".scales", f"has {self.groups} groups", f"a divisor of {k} inputs")
        parts.take(".qzeros", (torch.int32,), (self.groups, words))
        self.shape = (n, k)
        self.kind = f"AWQ 4-bit, {grouping(k, self.groups)}"

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale = self.parts[".scales"][:, first:last].t()
        code, zero = (
            unpack_columns(self.parts[part], 4, first, last, _PLACES).t()
            for part in (".qweight", ".qzeros")
        )
        return code.contiguous(), self.parts.finite(".scales", scale), zero
