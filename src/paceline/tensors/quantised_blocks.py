"""The block formats of quantised weights, decoded to integers and scales. Knows no file, no kernel.

A weight is ``scale * q``, or ``scale * q + minimum``, with one scale (and minimum) per group of 16
or 32 inputs. The formats are GGUF's (the specification and ggml's block structures) under its
names, and a few of our own for checkpoints whose scales are float32: ``Z4_32`` and ``Z4_128``
(scale, zero point of 8 bits, nibbles: ``scale * (code - zero)``), ``Z8_32`` and ``Z8_128`` (the
same with bytes), ``C8_32`` and ``C8_128`` (scale, int8), with as many inputs in a block, and
``F4_16`` (two scales, of 16 inputs each, and 32 nibbles of MXFP4's kind); nibbles lie as those of
Q4_0, 32 inputs after 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int16]

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""E2M1, doubled."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a format's blocks are made.

    Attributes:
        inputs: of a block.
        num_bytes: of a block.
        decode: blocks ``[n, blocks, num_bytes]`` to :class:`Decoded`.
    """

    inputs: int
    num_bytes: int
    decode: Callable[[Bytes], Decoded]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Weights ``[n, k]``, ``k`` rounded up to whole blocks.

    Attributes:
        codes: int16 ``[n, k]``, the integers q.
        scales: float32 ``[n, k / group]``.
        minima: the same, or None.
    """

    codes: Integers
    scales: Floats
    minima: Floats | None = None

    def floats(self) -> Floats:
        """What the weights stand for, float32 ``[n, k]``."""
        n, k = self.codes.shape
        groups = self.codes.reshape(n, self.scales.shape[1], -1).astype(np.float32)
        weights = groups * self.scales[:, :, None]
        if self.minima is not None:
            weights += self.minima[:, :, None]
        return weights.reshape(n, k)


FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Formats of weights that stay floats, and bytes of one."""
F8_INPUTS, F8_BYTES = 128, 132
"""``F8_128``, 8-bit floats (E4M3): blocks of a float32 scale and as many codes."""


def row_bytes(name: str, num_inputs: int) -> int:
    """Of one output's weights in a format of blocks or floats."""
    if name in FLOAT_BYTES:
        return FLOAT_BYTES[name] * num_inputs
    if name == "F8_128":
        return -(-num_inputs // F8_INPUTS) * F8_BYTES
    form = FORMATS[name]
    return -(-num_inputs // form.inputs) * form.num_bytes


def decode(name: str, rows: Bytes) -> Decoded:
    """Decode uint8 ``[n, bytes of a row]`` of the format of this name."""
    form = FORMATS[name]
    return form.decode(rows.reshape(len(rows), -1, form.num_bytes))


def quantise_q8_0(weights: Floats) -> Bytes:
    """Round float32 ``[n, k]`` to Q8_0: uint8 ``[n, bytes of a row]``.

    The scale of 32 inputs is the largest size / 127 as a 16-bit float, and codes are the nearest to
    what it makes them; inputs of the last block that are not there are zero.
    """
    n, k = weights.shape
    groups = np.pad(weights, ((0, 0), (0, -k % 32))).reshape(n, -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    halves = np.minimum(largest / np.float32(127.0), np.float32(65504.0)).astype(np.float16)
    scales = halves.astype(np.float32)
    codes = np.divide(groups, scales, out=np.zeros_like(groups), where=scales > 0.0)
    codes = np.clip(np.rint(codes), -127, 127).astype(np.int8)
    return np.concatenate((halves.view(np.uint8), codes.view(np.uint8)), axis=2).reshape(n, -1)


def _half(blocks: Bytes, at: int) -> Floats:
    """The 16-bit float at a byte of each block, ``[n, blocks, 1]``."""
    halves: Floats = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)
    return halves.astype(np.float32)


def _float(blocks: Bytes) -> Floats:
    scales: Floats = np.ascontiguousarray(blocks[..., :4]).view(np.float32)
    return scales


def _nibbles(part: Bytes, run: int) -> Integers:
    """Of every ``run`` bytes the low nibbles, then the high ones."""
    runs = part.reshape(*part.shape[:2], -1, 1, run)
    return (
        np.concatenate((runs & 15, runs >> 4), axis=3).reshape(*part.shape[:2], -1).astype(np.int16)
    )


def _planes(part: Bytes, run: int, bits: int) -> Integers:
    """Of every ``run`` bytes their lowest ``bits`` bits, then the next ones, and so on."""
    runs = part.reshape(*part.shape[:2], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    codes = runs >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(*part.shape[:2], -1).astype(np.int16)


def _decoded(codes: npt.NDArray[Any], scales: Floats, minima: Floats | None = None) -> Decoded:
    def flat(array: npt.NDArray[Any]) -> Any:
        return np.ascontiguousarray(array.reshape(len(array), -1))

    return Decoded(
        flat(codes.astype(np.int16)), flat(scales), None if minima is None else flat(minima)
    )


def _fifth_bits(blocks: Bytes, at: int) -> Integers:
    bits = np.unpackbits(np.ascontiguousarray(blocks[..., at : at + 4]), axis=-1, bitorder="little")
    return bits.astype(np.int16) << 4


def _q8_0(b: Bytes) -> Decoded:
    return _decoded(b[..., 2:].view(np.int8), _half(b, 0))


def _q4_0(b: Bytes) -> Decoded:
    return _decoded(_nibbles(b[..., 2:], 16) - 8, _half(b, 0))


def _q4_1(b: Bytes) -> Decoded:
    return _decoded(_nibbles(b[..., 4:], 16), _half(b, 0), _half(b, 2))


def _q5_0(b: Bytes) -> Decoded:
    return _decoded((_nibbles(b[..., 6:], 16) | _fifth_bits(b, 2)) - 16, _half(b, 0))


def _q5_1(b: Bytes) -> Decoded:
    return _decoded(_nibbles(b[..., 8:], 16) | _fifth_bits(b, 4), _half(b, 0), _half(b, 2))


def _iq4_nl(b: Bytes) -> Decoded:
    return _decoded(np.array(IQ4_VALUES, np.int16)[_nibbles(b[..., 2:], 16)], _half(b, 0))


def _mxfp4(b: Bytes) -> Decoded:
    exponents = b[..., :1].astype(np.int32)
    halved = np.ldexp(np.float32(1.0), exponents - 128)  # of doubled values
    return _decoded(np.array(FP4_VALUES, np.int16)[_nibbles(b[..., 1:], 16)], halved)


def _q2_k(b: Bytes) -> Decoded:
    scales = _half(b, 80) * (b[..., :16] & 15).astype(np.float32)
    minima = -_half(b, 82) * (b[..., :16] >> 4).astype(np.float32)
    return _decoded(_planes(b[..., 16:80], 32, 2), scales, minima)


def _q3_k(b: Bytes) -> Decoded:
    codes = _planes(b[..., 32:96], 32, 2) | _planes(b[..., :32], 32, 1) << 2
    four = _nibbles(b[..., 96:104], 8)
    two = _planes(b[..., 104:108], 4, 2)
    return _decoded(codes - 4, _half(b, 108) * ((four | two << 4) - 32).astype(np.float32))


def _six_bit_pairs(b: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and eight minima of 6 bits in bytes 4 to 15."""
    first, second, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = np.concatenate((first & 63, (rest & 15) | (first >> 6) << 4), axis=-1)
    minima = np.concatenate((second & 63, (rest >> 4) | (second >> 6) << 4), axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(b: Bytes) -> Decoded:
    scales, minima = _six_bit_pairs(b)
    return _decoded(_nibbles(b[..., 16:], 32), _half(b, 0) * scales, -_half(b, 2) * minima)


def _q5_k(b: Bytes) -> Decoded:
    scales, minima = _six_bit_pairs(b)
    codes = _nibbles(b[..., 48:], 32) | _planes(b[..., 16:48], 32, 1) << 4
    return _decoded(codes, _half(b, 0) * scales, -_half(b, 2) * minima)


def _q6_k(b: Bytes) -> Decoded:
    codes = _nibbles(b[..., :128], 64) | _planes(b[..., 128:192], 32, 2) << 4
    scales = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(np.float32)
    return _decoded(codes - 32, _half(b, 208) * scales)


def _iq4_xs(b: Bytes) -> Decoded:
    high = np.ascontiguousarray(b[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = b[..., 4:8].reshape(*b.shape[:2], 4, 1) >> np.array([0, 4], np.uint8) & 15
    scales = (low.reshape(*b.shape[:2], 8).astype(np.int16) | (high & 3).astype(np.int16) << 4) - 32
    codes = np.array(IQ4_VALUES, np.int16)[_nibbles(b[..., 8:], 16)]
    return _decoded(codes, _half(b, 0) * scales.astype(np.float32))


def _with_zeros(b: Bytes, codes: Integers, middle: int) -> Decoded:
    """``middle`` is what codes of 8 bits are shifted by, so that they fit the signed ones."""
    scales = np.repeat(_float(b), codes.shape[2] // 32, axis=2)
    minima = scales * (middle - b[..., 4:5].astype(np.float32))
    return _decoded(codes - middle, scales, minima)


def _z4(b: Bytes) -> Decoded:
    return _with_zeros(b, _nibbles(b[..., 5:], 16), 0)


def _z8(b: Bytes) -> Decoded:
    return _with_zeros(b, b[..., 5:].astype(np.int16), 128)


def _f4_16(b: Bytes) -> Decoded:
    scales = np.ascontiguousarray(b[..., :8]).view(np.float32)
    return _decoded(np.array(FP4_VALUES, np.int16)[_nibbles(b[..., 8:], 16)], scales)


def _c8(b: Bytes) -> Decoded:
    scales = np.repeat(_float(b), (b.shape[2] - 4) // 32, axis=2)
    return _decoded(np.ascontiguousarray(b[..., 4:]).view(np.int8), scales)


FORMATS = {
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "IQ4_NL": BlockFormat(32, 18, _iq4_nl),
    "MXFP4": BlockFormat(32, 17, _mxfp4),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
    "IQ4_XS": BlockFormat(256, 136, _iq4_xs),
    "Z4_32": BlockFormat(32, 21, _z4),
    "Z4_128": BlockFormat(128, 69, _z4),
    "Z8_32": BlockFormat(32, 37, _z8),
    "Z8_128": BlockFormat(128, 133, _z8),
    "F4_16": BlockFormat(32, 24, _f4_16),
    "C8_32": BlockFormat(32, 36, _c8),
    "C8_128": BlockFormat(128, 132, _c8),
}
"""By GGUF's name, in capitals, or one of ours: what is computed as it is stored."""
