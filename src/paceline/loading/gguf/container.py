"""The GGUF container: metadata and where each tensor's bytes lie. Knows no model and no arithmetic.

Read here rather than by the ``gguf`` package's reader, which trusts every count in the file and
makes several objects per array element. Every count, product and offset is checked against the
file's size before anything of that size exists.

A model may lie in several files, as llama.cpp's gguf-split writes them: each has a header and the
keys ``split.no``, ``split.count`` and ``split.tensors.count``, and all other metadata is that of
the first.

Format: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import ModelLoadError
from paceline.loading.gguf.choice import MAX_SHARDS, shard_name, sibling_shards

MAGIC = b"GGUF"
_MAX_ENTRIES = 1 << 16  # metadata keys, and tensors
_MAX_ELEMENTS = 1 << 24  # of one metadata array
_MAX_STRING = 1 << 26
_MAX_DIMS = 4
# Number types of the format: code -> little-endian numpy dtype.
_NUMBERS = {
    **dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))),
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufBytes:
    """One file, mapped or read."""

    path: Path
    data: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: ``shape`` slowest dimension first, ``offset`` from its file's start."""

    name: str
    shape: tuple[int, ...]
    type_code: int
    offset: int
    file: GgufBytes

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufContainer:
    """A parsed file. Metadata values are numbers, booleans, strings, and lists of those."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_container(path: Path, *, in_memory: bool = False) -> GgufContainer:
    """Parse the file, mapping its bytes or reading them all.

    Raises:
        ModelLoadError: it is not GGUF of a known version, is truncated, or a count is absurd.
    """
    cursor, num_tensors, num_keys = _opened(path, in_memory)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ModelLoadError(f"{path} has the metadata key {key[:80]!r} twice")
        metadata[key] = cursor.value()
    tensors = _tensor_infos(cursor, num_tensors, _alignment(path, metadata))
    return GgufContainer(path, metadata, tensors)


def read_architecture(path: Path) -> object:
    """The value of ``general.architecture``, which files begin with; None where there is none."""
    cursor, _, num_keys = _opened(path)
    for _ in range(num_keys):
        key, value = cursor.string(), cursor.value()
        if key == "general.architecture":
            return value
    return None


def _opened(path: Path, in_memory: bool = False) -> tuple[_Cursor, int, int]:
    """A file at its first metadata key, and how many tensors and keys it announces."""
    try:
        # A private, writable mapping: torch insists on memory that may be written.
        data = np.fromfile(path, np.uint8) if in_memory else np.memmap(path, np.uint8, mode="c")
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    cursor = _Cursor(path, data)
    if cursor.take(4) != MAGIC:
        raise ModelLoadError(f"{path} is not a GGUF file")
    version = cursor.number("<I")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        what = "a big-endian GGUF file" if swapped else f"GGUF version {version}"
        raise ModelLoadError(f"{path} is {what}; versions 2 and 3, little-endian, are supported")
    num_tensors = cursor.count(_MAX_ENTRIES, "tensors", smallest=24)
    return cursor, num_tensors, cursor.count(_MAX_ENTRIES, "metadata keys", smallest=13)


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or value < 8 or value > 1 << 20 or value & (value - 1):
        raise ModelLoadError(
            f"{path} says general.alignment = {str(value)[:40]}, which is not a power of two"
        )
    return value


def _tensor_infos(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    infos: list[TensorInfo] = []
    file = GgufBytes(cursor.path, cursor.data)
    for _ in range(count):
        name = cursor.string()
        num_dims = cursor.count(_MAX_DIMS, "dimensions", form="<I", smallest=8)
        dims = [cursor.number("<Q") for _ in range(num_dims)]
        if math.prod(dims) == 0 or math.prod(dims) > 1 << 48:
            raise ModelLoadError(f"tensor {name[:80]!r} in {cursor.path} has dimensions {dims}")
        kind, offset = cursor.number("<I"), cursor.number("<Q")
        infos.append(TensorInfo(name, tuple(dims[::-1]), kind, offset, file))
    start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in tensors or info.offset % alignment:
            raise ModelLoadError(f"tensor {info.name[:80]!r} in {cursor.path} is doubled or skewed")
        tensors[info.name] = replace(info, offset=start + info.offset)
    return tensors


class _Cursor:
    """Reads forward through the file, never past its end."""

    def __init__(self, path: Path, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.path, self.data = path, data
        self._data = data.data  # slices of it cost less than an array's
        self.offset = 0

    def _span(self, size: int) -> memoryview:
        end = self.offset + size
        if end > len(self._data):
            raise ModelLoadError(
                f"{self.path} is truncated or corrupt: {len(self._data)} bytes, but {size} more "
                f"are announced at byte {self.offset}; download it again"
            )
        start, self.offset = self.offset, end
        return self._data[start:end]

    def take(self, size: int) -> bytes:
        return bytes(self._span(size))

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self._span(struct.calcsize(form)))[0]
        return value

    def count(self, most: int, what: str, *, form: str = "<Q", smallest: int = 1) -> int:
        """A count of things that take at least ``smallest`` bytes each."""
        value = self.number(form)
        if value > most or value * smallest > len(self._data) - self.offset:
            raise ModelLoadError(
                f"{self.path} announces {value} {what} at byte {self.offset}; there can be at most "
                f"{most}, and no more than the file holds"
            )
        return value

    def string(self) -> str:
        size = self.count(_MAX_STRING, "characters")
        return str(self._span(size), "utf-8", "replace")

    def value(self) -> Any:
        code = self.number("<I")
        return self._array() if code == _ARRAY else self._scalar(code)

    def _scalar(self, code: int) -> Any:
        if code == _STRING:
            return self.string()
        return self._numbers(code, 1)[0]

    def _array(self) -> list[Any]:
        code = self.number("<I")
        if code == _STRING:
            return [self.string() for _ in range(self.count(_MAX_ELEMENTS, "strings", smallest=8))]
        return self._numbers(code, self.count(_MAX_ELEMENTS, "numbers"))

    def _numbers(self, code: int, count: int) -> list[Any]:
        if code not in _NUMBERS:  # nested arrays too: no model has them
            raise ModelLoadError(f"{self.path} has a value of type {code} at byte {self.offset}")
        dtype = np.dtype(_NUMBERS[code])
        values: list[Any] = np.frombuffer(self._span(count * dtype.itemsize), dtype).tolist()
        return values


_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_SHOWN = 3


def read_shards(path: Path, *, in_memory: bool = False) -> GgufContainer:
    """Parse a file, and the other shards of its model where it is one.

    Returns:
        The file's own container, or for shards the metadata of the first with the tensors of all.

    Raises:
        ModelLoadError: as :func:`read_container`; a shard is missing, or the shards are not of one
            model.
    """
    given = read_container(path, in_memory=in_memory)
    count = _whole(given, _COUNT, 1)
    if count <= 1:
        return given
    if count > MAX_SHARDS:
        raise ModelLoadError(f"{path} says {_COUNT} = {count}; at most {MAX_SHARDS} are read")
    number = _whole(given, _NUMBER)
    said = shard_name(path.name)
    if said is None or (said.number, said.total) != (number + 1, count):
        raise ModelLoadError(
            f"{path} says that it is shard {number + 1} of {count}: its name has to end in "
            f"-{number + 1:05d}-of-{count:05d}.gguf, by which the others are found"
        )
    paths = sibling_shards(path)
    _check_there(paths)
    shards = [
        given if place == number else read_container(shard, in_memory=in_memory)
        for place, shard in enumerate(paths)
    ]
    return GgufContainer(shards[0].path, shards[0].metadata, _joined(shards))


def _check_there(paths: list[Path]) -> None:
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ModelLoadError(
            f"{paths[0].parent} lacks {', '.join(missing[:_SHOWN])}{more} of the {len(paths)} "
            "shards of this model; download what is missing into the same folder"
        )


def _joined(shards: list[GgufContainer]) -> Mapping[str, TensorInfo]:
    """The tensors of all shards."""
    tensors: dict[str, TensorInfo] = {}
    total = _whole(shards[0], _TENSORS)
    for number, shard in enumerate(shards):
        for key, wanted in ((_NUMBER, number), (_COUNT, len(shards)), (_TENSORS, total)):
            value = _whole(shard, key)
            if value != wanted:
                raise ModelLoadError(
                    f"{shard.path} says {key} = {value}, and the other shards need {wanted}: it is "
                    "of another model, or damaged; download it again"
                )
        doubled = next((name for name in shard.tensors if name in tensors), None)
        if doubled is not None:
            raise ModelLoadError(
                f"tensor {doubled[:80]!r} is in {shard.path} and in a shard before it: the files "
                "are of different models"
            )
        tensors |= shard.tensors
    if len(tensors) != total:
        raise ModelLoadError(
            f"the {len(shards)} shards of {shards[0].path} have {len(tensors)} tensors, and "
            f"{_TENSORS} announces {total}: they are of different models, or damaged"
        )
    return tensors


def _whole(shard: GgufContainer, key: str, default: int | None = None) -> int:
    value: Any = shard.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise ModelLoadError(
            f"{shard.path} says {key} = {str(value)[:40]}; it must be a whole number"
        )
    return value
