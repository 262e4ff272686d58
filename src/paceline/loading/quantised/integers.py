"""Linears of integer weights as compressed-tensors and bitsandbytes store them, read and written.

Integers are signed here and shifted when they are read, so that codes count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.core.errors import UnsupportedModelError
from paceline.loading.quantised.weight import (
    FLOATS,
    CodedWeight,
    Parts,
    group_index,
    grouping,
    unpack_columns,
    unpack_words,
)
from paceline.tensors.arrays import Array, Floats, floats

_WHOLE = (np.int32, np.int64)
_INT8 = (np.int8,)


class PackedWeight(CodedWeight):
    """``weight_packed`` int32 ``[n, words]``: 4- or 8-bit codes packed along inputs.

    ``weight_shape`` says what the last word has of them. Zeros are packed along outputs, or plain
    int8 as older versions wrote them; without any, codes are symmetric about their middle.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        n, words = parts.take(".weight_packed", (np.int32,), (None, None)).shape
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
            packed = parts[".weight_zero_point"].dtype == np.int32
            shapes = [(-(-n * self.bits // 32), self.groups)]
            zeros = shapes if packed else _scale_shapes(n, self.groups)
            parts.take(".weight_zero_point", (np.int32, np.int8), *zeros)
        self.kind = f"compressed-tensors {self.bits}-bit, {grouping(k, self.groups)}"

    def _has_index(self) -> bool:
        part = ".weight_g_idx"
        if not self.parts.has(part):
            return False
        return bool((self.parts[part] != -1).any())  # all: not in use

    def index(self) -> Array | None:
        if not self._has_index():
            return None
        return group_index(self.parts, ".weight_g_idx", self.shape[1], self.groups)

    def read(self, first: int, last: int) -> tuple[Array, Array, Array]:
        parts, (n, k) = self.parts, self.shape
        words = parts[".weight_packed"][first:last]
        code = np.ascontiguousarray(unpack_words(words, self.bits)[:, :k])
        scale = _scale(parts, ".weight_scale", first, last, n)
        middle = 1 << (self.bits - 1)
        if not parts.has(".weight_zero_point"):
            return code, scale, np.full(scale.shape, middle, np.uint8)
        zeros = parts[".weight_zero_point"]
        if zeros.dtype == np.int8:
            if zeros.min() < -middle or zeros.max() >= middle:
                limits = f"from {-middle} to {middle - 1}"
                raise parts.error(".weight_zero_point", "holds a zero out of range", limits)
            return code, scale, _shifted(_by_row(zeros, n)[first:last], middle)
        return code, scale, unpack_columns(zeros.T, self.bits, first, last).T


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

    def read(self, first: int, last: int) -> tuple[Array, Array, Array]:
        parts, n = self.parts, self.shape[0]
        code = _shifted(parts[".weight"][first:last], 128)
        scale = _scale(parts, self._scale, first, last, n) * np.float32(self._factor)
        if not (self._zero and parts.has(self._zero)):
            return code, scale, np.full(scale.shape, 128, np.uint8)
        zeros = _by_row(parts[self._zero], n)[first:last]
        return code, scale, _shifted(zeros, 128)


def _shifted(signed: Array, middle: int) -> Array:
    """Signed integers from ``-middle`` on as unsigned ones from 0 on."""
    return (signed.astype(np.int16) + middle).astype(np.uint8)


def _groups(parts: Parts, n: int, scale: str = ".weight_scale") -> int:
    """Scales of a row, after their shape was checked."""
    scales = parts.take(scale, FLOATS, (n, None), (n,), (1,), (1, 1), ())
    return scales.shape[1] if scales.ndim == 2 else 1


def _scale_shapes(n: int, groups: int) -> list[tuple[int, ...]]:
    return [(n, groups), *([(n,), (1,), (1, 1), ()] if groups == 1 else [])]


def _scale(parts: Parts, part: str, first: int, last: int, n: int) -> Array:
    scale = _by_row(parts[part], n)[first:last]
    return parts.finite(part, scale)


def _by_row(values: Array, n: int) -> Array:
    """What is stored for all weights, or for each row, as ``[n, ...]``."""
    values = values.reshape(-1, 1) if values.ndim < 2 else values
    return np.broadcast_to(values, (n, values.shape[1])) if len(values) == 1 else values


GROUP = 32
"""Inputs that share a scale, as in GGUF's Q8_0."""
_SHARES = np.linspace(0.75, 1.2, 19, dtype=np.float32)
"""Shares of a group's largest weight that the lowest of 16 codes may stand for."""


def packed_config(bits: int) -> Mapping[str, Any]:
    """The ``quantization_config`` of a checkpoint whose linears are :func:`packed`."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True}
    weights |= {"strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [],
    }


def is_packable(weight: Array) -> bool:
    """Whether a weight has rows that groups divide."""
    return weight.ndim == 2 and weight.shape[1] % GROUP == 0


def packed(name: str, weight: Floats, bits: int = 8) -> dict[str, Array]:
    """A linear ``[n, k]`` in 8 or 4 bits, a 16-bit scale for :data:`GROUP` inputs: arrays by name.

    Of 4 bits that scale is taken, of several, which leaves the least squared error.
    """
    middle = 1 << (bits - 1)
    groups = weight.reshape(len(weight), -1, GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)[..., 0]
    scales = [np.abs(largest) / np.float32(127)]
    if bits == 4:
        scales = [largest / np.float32(-middle) * share for share in _SHARES]
    scale, least = np.zeros(largest.shape, np.float16), np.full(largest.shape, np.inf, np.float32)
    code = np.zeros_like(groups)
    for tried in scales:
        new_scale = tried.astype(np.float16)
        new_code = _nearest(groups, new_scale, 127 if bits == 8 else middle, middle - 1)
        error = np.square(new_code * floats(new_scale)[..., None] - groups).sum(axis=2)
        is_better = error < least
        code = np.where(is_better[..., None], new_code, code)
        scale, least = np.where(is_better, new_scale, scale), np.minimum(error, least)
    codes: Array = (code.reshape(weight.shape) + middle).astype(np.uint8)
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return {
        f"{name}_packed": np.ascontiguousarray(codes).view(np.int32),
        f"{name}_scale": scale,
        f"{name}_shape": np.array(weight.shape, np.int64),
    }


def _nearest(groups: Floats, scale: Array, below: int, above: int) -> Floats:
    """The whole numbers from ``-below`` to ``above`` that times their scale are nearest."""
    divisor = np.where(scale != 0, floats(scale), np.float32(1.0))[..., None]
    nearest: Floats = np.clip(np.round(groups / divisor), -below, above)
    return nearest
