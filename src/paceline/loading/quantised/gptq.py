"""Linears as GPTQ and AWQ store them: codes packed along inputs or outputs, zeros along outputs.

Sizes come from the tensors, so modules with other settings than the rest (``dynamic``) need no
more than being stored. Version 1 of GPTQ's format stores every zero minus one; the subtraction was
of whole words and borrowed across their codes, which the addition of whole words undoes. Some
programs write symmetric checkpoints of version 2 and say version 1: their zeros, which can be
nothing but the middle, tell. AWQ (``gemm``) interleaves what it packs along outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from paceline.core.errors import UnsupportedModelError
from paceline.loading.quantised.weight import (
    FLOATS,
    CodedWeight,
    Parts,
    Scheme,
    group_index,
    grouping,
    unpack_columns,
    unpack_words,
)
from paceline.models.families.fields import supported
from paceline.tensors.arrays import Array

_FORMATS = {"gptq": True, "gptq_v2": False}  # whether zeros are stored minus one
_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
_MIDDLES = {4: np.uint32(0x88888888), 8: np.uint32(0x80808080)}
_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")


def schemes(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    form = str(config.get("checkpoint_format") or "gptq")
    minus_one = supported("the GPTQ format", form, _FORMATS)
    opened = partial(GptqWeight, minus_one=minus_one, symmetric=config.get("sym") is True)
    return (Scheme(".qweight", _PARTS, opened),)


class GptqWeight(CodedWeight):
    """``qweight`` ``[k / codes of a word, n]``, ``qzeros`` ``[groups, n / codes of a word]``,
    ``scales`` ``[groups, n]`` and, in whatever order, the group ``g_idx`` ``[k]`` of each input."""

    def __init__(self, parts: Parts, *, minus_one: bool, symmetric: bool) -> None:
        self.parts = parts
        self.groups, n = parts.take(".scales", FLOATS, (None, None)).shape
        zeros = parts.take(".qzeros", (np.int32,), (self.groups, None))
        self.bits = _bits(parts, zeros.shape[1] * 32, n)
        words = parts.take(".qweight", (np.int32,), (None, n)).shape[0]
        k = words * 32 // self.bits
        if parts.has(".g_idx"):
            parts.take(".g_idx", (np.int32, np.int64), (k,))
        elif k % self.groups:
            raise parts.error(".scales", f"has {self.groups} groups", f"a divisor of {k} inputs")
        self.shape = (n, k)
        self.kind = f"GPTQ {self.bits}-bit, {grouping(k, self.groups)}"
        self._minus_one, self._symmetric = minus_one, symmetric

    def index(self) -> Array | None:
        if not self.parts.has(".g_idx"):
            return None
        return group_index(self.parts, ".g_idx", self.shape[1], self.groups)

    def read(self, first: int, last: int) -> tuple[Array, Array, Array]:
        parts, rows = self.parts, slice(first, last)
        words = parts[".qweight"][:, rows].T
        scale = parts[".scales"][:, rows].T
        zero = unpack_columns(self._zeros(), self.bits, first, last).T
        return unpack_words(words, self.bits), parts.finite(".scales", scale), zero

    def _zeros(self) -> Array:
        """The packed zeros as version 2 stores them."""
        words = self.parts[".qzeros"].view(np.uint32)
        told_wrong = self._symmetric and bool((words == _MIDDLES[self.bits]).all())
        if self._minus_one and not told_wrong:
            words = words + _ONES[self.bits]
        return words.view(np.int32)


def _bits(parts: Parts, stored: int, outputs: int) -> int:
    """Of each code, by the bits that the zeros of all outputs take."""
    if stored == 4 * outputs:
        return 4
    if stored == 8 * outputs:
        return 8
    raise UnsupportedModelError(
        f"{parts.name('.qzeros')} has {stored} bits for {outputs} outputs, so it is damaged, or "
        "weights are not of 4 or 8 bits, which alone are supported of GPTQ"
    )


_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of each of 8 outputs within its word


def awq_schemes(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    version = str(config.get("version") or "gemm").lower()
    bits = config.get("bits", config.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise UnsupportedModelError(
            f"AWQ checkpoints of version {version[:40]!r} with {str(bits)[:40]} bits are not "
            "supported; supported: 'gemm' with 4 bits"
        )
    return (Scheme(".qweight", (".qweight", ".qzeros", ".scales"), AwqWeight),)


class AwqWeight(CodedWeight):
    """``qweight`` ``[k, n / 8]``, ``qzeros`` ``[groups, n / 8]``, ``scales`` ``[groups, n]``."""

    bits = 4

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        k, words = parts.take(".qweight", (np.int32,), (None, None)).shape
        n = words * 8
        self.groups = parts.take(".scales", FLOATS, (None, n)).shape[0]
        if k % self.groups:
            raise parts.error(".scales", f"has {self.groups} groups", f"a divisor of {k} inputs")
        parts.take(".qzeros", (np.int32,), (self.groups, words))
        self.shape = (n, k)
        self.kind = f"AWQ 4-bit, {grouping(k, self.groups)}"

    def read(self, first: int, last: int) -> tuple[Array, Array, Array]:
        scale = self.parts[".scales"][:, first:last].T
        code, zero = (
            unpack_columns(self.parts[part], 4, first, last, _PLACES).T
            for part in (".qweight", ".qzeros")
        )
        return np.ascontiguousarray(code), self.parts.finite(".scales", scale), zero
