"""The file of an n-gram model: written whole, mapped into memory, checked. Knows no text.

``docs/formats.md`` describes it byte by byte. It is untrusted: every count, offset, token and
probability is checked against the file's size and its own limits before anything is looked up, and
nothing is allocated that the file does not have room for.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.core.errors import ModelLoadError
from paceline.core.json_file import HEAD_BYTES, check_fetched
from paceline.core.writing import whole_file
from paceline.proposers.ngram_model.tables import (
    MAX_BUCKET_BITS,
    MAX_CONTINUATIONS,
    MAX_ORDER,
    MIN_ORDER,
    Level,
    NgramTables,
)

MAGIC = b"PACENGRM"
VERSION, KNOWN_VERSIONS = 2, (1, 2)
"""A file of version 1 does not say which prompts were learnt."""
_HEADER = struct.Struct("<8sIIQQ16sIIQ")
_LEVEL = struct.Struct("<QQII")
_HASHED_FROM = 32
_PROMPTS = struct.Struct("<Q")
_LEVELS_AT = _HEADER.size
_PROMPTS_AT = 160
_DATA_AT = 192
_BACKOFF = 1
_UNKNOWN = bytes(16)


def write_tables(tables: NgramTables, path: str | Path) -> int:
    """Write the file, whole or not at all (``ModelLoadError``); returns its size in bytes."""
    parts = _parts(tables)
    with whole_file(path, ModelLoadError) as partial, partial.open("wb") as file:
        file.writelines(parts)
    return sum(map(len, parts))


def _parts(tables: NgramTables) -> list[bytes]:
    """The header and everything after it."""
    fingerprint = bytes.fromhex(tables.fingerprint) if tables.fingerprint else _UNKNOWN
    directory = b"".join(
        _LEVEL.pack(len(level.keys), len(level.tokens), level.bucket_bits, 0)
        for level in tables.levels
    )
    directory = directory.ljust(_PROMPTS_AT - _LEVELS_AT, b"\0")
    directory += _PROMPTS.pack(len(tables.prompts))
    body = [directory.ljust(_DATA_AT - _LEVELS_AT, b"\0")]
    for array, dtype in _sections(tables):
        data = np.ascontiguousarray(array, dtype).tobytes()
        body.append(data.ljust(_padded(len(data)), b"\0"))
    size = _LEVELS_AT + sum(map(len, body))
    flags = _BACKOFF if tables.is_backoff else 0
    counts = (fingerprint, tables.vocab_size, flags, tables.num_tokens)
    fields = (MAGIC, VERSION, tables.order, size)
    digest = xxhash.xxh3_64(_HEADER.pack(*fields, 0, *counts)[_HASHED_FROM:])
    for data in body:
        digest.update(data)
    return [_HEADER.pack(*fields, digest.intdigest(), *counts), *body]


def read_tables(path: str | Path) -> NgramTables:
    """Map a file into memory and check it.

    Raises:
        ModelLoadError: it cannot be read, is no n-gram model of a known version, or is damaged.
    """
    try:
        with Path(path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return parse_tables(mapped, str(path))


def parse_tables(data: bytes | mmap.mmap, name: str) -> NgramTables:
    """The tables in the bytes of a file, as views of them; raises as :func:`read_tables`."""
    order, fingerprint, vocab_size, flags, num_tokens, num_prompts = _header(data, name)
    views = _Views(data, name)
    unigrams = views.take(vocab_size, "<f4")
    levels = []
    for at in range(order - 1):
        contexts, entries, bits, _ = _LEVEL.unpack_from(data, _LEVELS_AT + at * _LEVEL.size)
        if not 1 <= bits <= MAX_BUCKET_BITS:
            raise ModelLoadError(f"{name} is damaged: a level has {bits} bits of buckets")
        lengths = (contexts, (1 << bits) + 1, contexts + 1, contexts, entries, entries)
        kinds = ("<u8", "<u4", "<u4", "<f4", "<u4", "<f4")
        levels.append(Level(*map(views.take, lengths, kinds)))
    prompts = views.take(num_prompts, "<u8")
    views.end()
    known = None if fingerprint == _UNKNOWN else fingerprint.hex()
    is_backoff = bool(flags & _BACKOFF)
    tables = NgramTables(known, is_backoff, num_tokens, unigrams, tuple(levels), prompts)
    problem = next(_problems(tables), None)
    if problem:
        raise ModelLoadError(f"{name} is damaged: {problem}")
    return tables


def _header(data: bytes | mmap.mmap, name: str) -> tuple[int, bytes, int, int, int, int]:
    """Order, fingerprint, size of the vocabulary, flags, tokens and prompts, all checked."""
    check_fetched(name, data[:HEAD_BYTES])
    if len(data) < _DATA_AT or data[:8] != MAGIC:
        raise ModelLoadError(f"{name} is not an n-gram model; paceline train ngram makes one")
    _, version, order, size, digest, fingerprint, vocab_size, flags, num_tokens = (
        _HEADER.unpack_from(data)
    )
    if version not in KNOWN_VERSIONS:
        known = " and ".join(map(str, KNOWN_VERSIONS))
        raise ModelLoadError(f"{name} has format version {version}; known: {known}")
    if not MIN_ORDER <= order <= MAX_ORDER or flags & ~_BACKOFF:
        raise ModelLoadError(
            f"{name} has order {order} and flags {flags:#x}; allowed: orders {MIN_ORDER} to "
            f"{MAX_ORDER} and flags 0 and 1"
        )
    if size != len(data):
        raise ModelLoadError(f"{name} has {len(data)} bytes and states {size}; it is incomplete")
    if xxhash.xxh3_64_intdigest(memoryview(data)[_HASHED_FROM:]) != digest:
        raise ModelLoadError(f"{name} is damaged: its checksum is wrong")
    (num_prompts,) = _PROMPTS.unpack_from(data, _PROMPTS_AT) if version > 1 else (0,)
    return order, fingerprint, vocab_size, flags, num_tokens, num_prompts


class _Views:
    """Hands out the sections of a file one after another."""

    def __init__(self, data: bytes | mmap.mmap, name: str) -> None:
        self._data, self._name, self._at = data, name, _DATA_AT

    def take(self, count: int, kind: str) -> NDArray[Any]:
        dtype = np.dtype(kind)
        size = count * dtype.itemsize
        if size > len(self._data) - self._at:
            raise ModelLoadError(f"{self._name} is damaged: a section goes beyond its end")
        array = np.frombuffer(self._data, dtype, count, self._at)
        self._at += _padded(size)
        return array.astype(dtype.newbyteorder("="), copy=False)

    def end(self) -> None:
        if self._at != len(self._data):
            raise ModelLoadError(f"{self._name} is damaged: its sections do not fill it")


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _sections(tables: NgramTables) -> Iterator[tuple[NDArray[Any], str]]:
    yield tables.unigrams, "<f4"
    for level in tables.levels:
        yield level.keys, "<u8"
        yield level.buckets, "<u4"
        yield level.starts, "<u4"
        yield level.lower_weights, "<f4"
        yield level.tokens, "<u4"
        yield level.values, "<f4"
    yield tables.prompts, "<u8"


def _problems(tables: NgramTables) -> Iterator[str]:
    if not _are_probabilities(tables.unigrams):
        yield "a unigram is not a probability"
    if (tables.prompts[1:] <= tables.prompts[:-1]).any():
        yield "the keys of its prompts do not ascend"
    for length, level in enumerate(tables.levels, start=1):
        of = f"of the contexts of {length} tokens "
        for bounds, end in ((level.buckets, level.keys), (level.starts, level.tokens)):
            if bounds[0] != 0 or bounds[-1] != len(end) or (bounds[1:] < bounds[:-1]).any():
                yield of + "bounds do not run through what they bound"
        if (level.keys[1:] <= level.keys[:-1]).any():
            yield of + "keys do not ascend"
        if len(level.keys) and (level.starts[1:] - level.starts[:-1]).max() > MAX_CONTINUATIONS:
            yield of + f"one has more than {MAX_CONTINUATIONS} continuations"
        if len(level.tokens) and level.tokens.max() >= tables.vocab_size:
            yield of + "a continuation is outside the vocabulary"
        if not (_are_probabilities(level.values) and _are_probabilities(level.lower_weights)):
            yield of + "a value is not a probability"


def _are_probabilities(values: NDArray[np.float32]) -> bool:
    """True of an empty array too; numbers that are none compare as false."""
    return bool(((values >= 0.0) & (values <= 1.0)).all())
