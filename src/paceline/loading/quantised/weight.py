"""What one quantised linear is made of, and what a format of quantisation makes of it.

Its stored tensors and what ``quantization_config`` says of it are untrusted: owns how they are
checked and unpacked, and how codes and scales become the blocks that linears compute with, in which
nothing is rounded. Nothing is copied until somebody computes with it. Knows no format by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ModelLoadError
from paceline.tensors.arrays import BFLOAT16, Array, Floats, as_bytes, floats
from paceline.tensors.quantised_blocks import FORMATS, FP4_VALUES
from paceline.tensors.stored import StoredRows, StoredTensors

Shape = tuple[int | None, ...]
"""Sizes, where None stands for any but 0."""

FLOATS: tuple[np.dtype[Any], ...] = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors whose names begin with ``linear``, such as ``model.layers.0.mlp.up_proj``."""

    tensors: StoredTensors
    linear: str

    def name(self, part: str) -> str:
        """What a part is called in the checkpoint; ``part`` begins with its dot."""
        return self.linear + part

    def has(self, part: str) -> bool:
        return self.name(part) in self.tensors

    def __getitem__(self, part: str) -> Array:
        """A tensor whose type and shape were checked before; ``ModelLoadError`` without it."""
        return self.tensors[self.name(part)]

    def take(self, part: str, types: Collection[npt.DTypeLike], *shapes: Shape) -> Array:
        """A tensor of one of the types and shapes; ``ModelLoadError`` where there is none."""
        tensor = self[part]
        if tensor.dtype not in types:
            wanted = " or ".join(str(np.dtype(kind)) for kind in types)
            raise self.error(part, f"is of type {self.tensors.type_of(self.name(part))}", wanted)
        found = tuple(tensor.shape)
        if not any(_fits(found, shape) for shape in shapes):
            raise self.error(part, f"has shape {found}", " or ".join(map(_told, shapes)))
        return tensor

    def finite(self, part: str, values: Array) -> Floats:
        """Scales read from a part, as float32; ``ModelLoadError`` where one is not finite."""
        values = floats(values)
        if not np.isfinite(values).all():
            raise self.error(part, "holds a scale that is infinite or not a number", "finite")
        return values

    def error(self, part: str, found: str, wanted: str) -> ModelLoadError:
        return ModelLoadError(
            f"tensor {self.name(part)} {found}; as a part of a quantised weight it must be {wanted}"
        )


def _fits(found: tuple[int, ...], shape: Shape) -> bool:
    return len(found) == len(shape) and all(
        (size >= 1 if want is None else size == want)
        for size, want in zip(found, shape, strict=True)
    )


def _told(shape: Shape) -> str:
    sizes = ["any" if size is None else str(size) for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def as_object(value: object) -> Mapping[str, Any]:
    """The value where it is an object, otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}


def block_size(said: object, key: str) -> tuple[int, int]:
    """Rows and inputs of a block, from two whole numbers in a list or written as ``128x128``."""
    values = said.split("x") if isinstance(said, str) else said
    if isinstance(values, list | tuple) and len(values) == 2:
        high, wide = (int(v) if str(v).isdecimal() and len(str(v)) < 8 else 0 for v in values)
        if high and wide:
            return high, wide
    raise ModelLoadError(
        f"the model configuration says {key} = {str(said)[:40]}; it must be two whole numbers, "
        "both at least 1"
    )


def unpack_words(words: Array, bits: int) -> Array:
    """Codes of 4 or 8 bits, uint8 ``[..., w * 32 / bits]``, out of int32 ``[..., w]``."""
    data = np.ascontiguousarray(words).view(np.uint8)
    return data if bits == 8 else unpack_nibbles(data)


def unpack_nibbles(data: Array) -> Array:
    """Codes of 4 bits, uint8 ``[..., 2 * b]``, out of bytes ``[..., b]``, the low half first."""
    halves = np.stack((data & 15, data >> 4), -1)
    return halves.reshape(*data.shape[:-1], -1)


def unpack_columns(
    words: Array, bits: int, first: int, last: int, places: Array | None = None
) -> Array:
    """Columns ``first:last`` of what int32 ``[m, w]`` hold, without unpacking the others.

    Args:
        places: where within its word each column lies, if not one after the other.
    """
    each = 32 // bits
    start = first // each
    codes = unpack_words(words[:, start : -(-last // each)], bits)
    if places is not None:
        codes = codes.reshape(len(words), -1, each)[:, :, places].reshape(len(words), -1)
    return codes[:, first - start * each : last - start * each]


_NO_NUMBER = 255


def powers_of_two(parts: Parts, part: str, exponents: Array, lower: int = 0) -> Array:
    """``2 ** (exponent - 127 - lower)``, float32 and exact; ``ModelLoadError`` for 255, a NaN."""
    if (exponents == _NO_NUMBER).any():
        raise parts.error(part, "holds a scale that is not a number", "below 255 throughout")
    return np.asarray(np.ldexp(np.float32(1.0), exponents.astype(np.int32) - 127 - lower))


def looked_up(table: Array, code: Array) -> Array:
    """``table[code]`` as float32."""
    return np.take(table.astype(np.float32), code)


def blocks_of(bits: int, code: Array, scale: Array, zero: Array) -> StoredRows | None:
    """Integers and scales in a format of blocks that holds them; None without one.

    Weight ``(row, j)`` is ``scale[row, g] * (code[row, j] - zero[row, g])`` in group ``g``.

    Args:
        bits: of a code, 4 or 8.
        code: uint8 ``[n, k]``.
        scale: ``[n, groups]``, each of as many inputs, one group after the other.
        zero: uint8 ``[n, groups]``.
    """
    k, groups = code.shape[1], scale.shape[1]
    group = k // groups
    if k % 32 or group % 32:
        return None
    inputs = 128 if group % 128 == 0 else 32
    scales = _floats(np.repeat(scale, group // inputs, axis=1))
    if bits == 8 and bool((zero == 128).all()):
        return _stored(f"C8_{inputs}", scales, code ^ 128)
    zeros = np.repeat(zero, group // inputs, axis=1)
    return _stored(f"Z{bits}_{inputs}", scales, zeros, code if bits == 8 else _nibbles(code))


def fp4_blocks(code: Array, scale: Array) -> StoredRows | None:
    """The same of 4-bit floats, doubled: as MXFP4 where scales are powers of two for 32 inputs."""
    group = code.shape[1] // scale.shape[1]
    mantissa, exponent = np.frexp(scale)
    if code.shape[1] % 32:
        return None
    if group == 32 and bool(((mantissa == 0.5) & (exponent > -128)).all()):
        return _stored("MXFP4", (exponent + 127).astype(np.uint8), _nibbles(code))
    return _stored("F4_16", _floats(scale), _nibbles(code)) if group == 16 else None


def fp8_blocks(value: Array, scale: Array, block: tuple[int, int]) -> StoredRows | None:
    """The same of 8-bit floats, a scale for 128 inputs at a time.

    Args:
        value: float8_e4m3fn ``[n, k]``.
        scale: float32, one for each block; blocks at the ends may be cut off.
        block: rows and inputs that share a scale.
    """
    (high, wide), (n, k) = block, value.shape
    if wide % 128 and wide < k:
        return None
    units = -(-k // 128)
    scale = scale[np.arange(n) // high][:, np.arange(units) * 128 // wide]
    codes = np.pad(as_bytes(value), ((0, 0), (0, units * 128 - k)))
    parts = [_floats(scale).reshape(n, units, 4), codes.reshape(n, units, 128)]
    return StoredRows("F8_128", np.concatenate(parts, axis=2).reshape(n, -1))


def _floats(values: Array) -> Array:
    return as_bytes(floats(values))


def _nibbles(code: Array) -> Array:
    """Of 32 inputs each the first 16 in the low nibbles, the others in the high ones."""
    halves = code.reshape(len(code), -1, 2, 16)
    nibbles: Array = halves[:, :, 0] | halves[:, :, 1] << 4
    return nibbles.reshape(len(code), -1)


def _stored(form: str, *parts: Array) -> StoredRows:
    """Rows of blocks out of parts ``[n, blocks * bytes]``."""
    n = len(parts[0])
    blocks = sum(part.shape[1] for part in parts) // FORMATS[form].num_bytes
    rows = np.concatenate([part.reshape(n, blocks, -1) for part in parts], axis=2)
    return StoredRows(form, rows.reshape(n, -1))


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
        is_fp4: whether codes stand for :data:`FP4_VALUES`, and not for themselves less a zero.
    """

    bits: int
    groups: int
    is_fp4: bool = False

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
        if self.is_fp4:
            values = looked_up(np.array(FP4_VALUES), code)
        else:
            values = code.astype(np.float32)
            values -= zero
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
        stored = fp4_blocks(code, scale) if self.is_fp4 else blocks_of(self.bits, code, scale, zero)
        if stored is None or order is None:
            return stored
        return stored._replace(order=order.astype(np.int32))


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
