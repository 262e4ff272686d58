"""The file of an n-gram model: it comes back as it was written, and nothing in it is trusted."""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from paceline.backends.native.native import native_module, why_not_native
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.loading.catalogue import embedded_ngram_model
from paceline.proposers.ngram_model import (
    NgramLevel,
    NgramLookup,
    NgramTables,
    NgramText,
    context_key,
    parse_tables,
    read_tables,
    write_tables,
)
from tests.proposers.ngrams import toy_tables, train

FINGERPRINT = "0123456789abcdef" * 2
CHECKSUM_AT, HASHED_FROM, PROMPTS_AT, DATA_AT = 24, 32, 160, 192
PROMPTS = np.array([3, 1 << 63], np.uint64)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small model's file."""
    path = tmp_path_factory.mktemp("ngrams") / "small.ngram"
    tables = train([[1, 2, 3, 1, 2, 4], [4, 3, 2, 1, 0]], order=3, vocab_size=5)
    tables = dataclasses.replace(tables, fingerprint=FINGERPRINT, prompts=PROMPTS)
    write_tables(tables, path)
    return path.read_bytes()


def signed(data: bytes | bytearray) -> bytes:
    """The bytes with the checksum that they should have."""
    digest = xxhash.xxh3_64_intdigest(bytes(data[HASHED_FROM:]))
    return bytes(data[:CHECKSUM_AT]) + struct.pack("<Q", digest) + bytes(data[HASHED_FROM:])


def patched(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize("is_backoff", [False, True])
@pytest.mark.parametrize("order", [2, 5])
def test_a_file_comes_back_as_it_was_written(tmp_path: Path, order: int, is_backoff: bool) -> None:
    tables = train([[1, 2, 3, 1, 2, 4] * 4, [5]], order, vocab_size=6)
    kept = {"fingerprint": FINGERPRINT, "prompts": PROMPTS, "is_backoff": is_backoff}
    tables = dataclasses.replace(tables, **kept)
    assert write_tables(tables, tmp_path / "model") == (tmp_path / "model").stat().st_size
    found = read_tables(tmp_path / "model")
    for name in ("fingerprint", "is_backoff", "num_tokens", "order", "vocab_size"):
        assert getattr(found, name) == getattr(tables, name)
    assert np.array_equal(found.unigrams, tables.unigrams)
    assert np.array_equal(found.prompts, tables.prompts)
    for written, read in zip(tables.levels, found.levels, strict=True):
        for column in dataclasses.fields(NgramLevel):
            assert np.array_equal(getattr(written, column.name), getattr(read, column.name))
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]  # no unfinished file is left


def test_files_of_the_first_version_are_read_on(tmp_path: Path) -> None:
    write_tables(toy_tables(), tmp_path / "model")
    old = signed(patched((tmp_path / "model").read_bytes(), 8, b"\x01"))
    found = parse_tables(old, "old")
    assert len(found.prompts) == 0
    assert np.array_equal(found.levels[-1].values, toy_tables().levels[-1].values)
    assert len(read_tables(embedded_ngram_model()).prompts) == 0


def test_every_key_is_in_its_bucket() -> None:
    for level in toy_tables().levels:
        for at, key in enumerate(level.keys.tolist()):
            bucket = key >> (64 - level.bucket_bits)
            assert level.buckets[bucket] <= at < level.buckets[bucket + 1]


def test_the_vocabulary_must_be_the_targets(image: bytes) -> None:
    tables = parse_tables(image, "small")
    tables.check_fits("small", 5, FINGERPRINT)
    tables.check_fits("small", 6, None)  # a target without a tokenizer
    with pytest.raises(ConfigError, match="another tokenizer"):
        tables.check_fits("small", 5, "f" * 32)
    with pytest.raises(ConfigError, match="5 tokens and the target has 4"):
        tables.check_fits("small", 4, FINGERPRINT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"", "not an n-gram model"),
        (lambda d: d[:191], "not an n-gram model"),
        (lambda d: patched(d, 0, b"GGUF"), "not an n-gram model"),
        (lambda d: patched(d, 8, b"\x03"), "format version 3; known: 1 and 2"),
        (lambda d: patched(d, 12, b"\x09"), "order 9"),
        (lambda d: patched(d, 52, b"\x06"), "flags 0x6"),
        (lambda d: d[:-8], "it is incomplete"),
        (lambda d: patched(d, len(d) - 9, b"\xff"), "checksum"),
        (lambda d: signed(patched(d, 48, b"\xff" * 4)), "beyond its end"),
        (lambda d: signed(patched(d, 48, bytes(4))), "damaged"),
        (lambda d: signed(patched(d, 64, b"\xff" * 8)), "beyond its end"),
        (lambda d: signed(patched(d, 72, b"\xff" * 8)), "beyond its end"),
        (lambda d: signed(patched(d, 80, b"\x00")), "0 bits"),
        (lambda d: signed(patched(d, 80, b"\xff")), "255 bits"),
        (lambda d: signed(patched(d, DATA_AT, struct.pack("<f", 1.5))), "unigram"),
        (lambda d: signed(patched(d, DATA_AT, struct.pack("<f", float("nan")))), "unigram"),
        (lambda d: signed(patched(d, DATA_AT + 24, b"\xff" * 8)), "keys do not ascend"),
        (lambda d: signed(patched(d, PROMPTS_AT, b"\xff" * 8)), "beyond its end"),
        (lambda d: signed(patched(d, PROMPTS_AT, b"\x01")), "do not fill it"),
        (lambda d: signed(patched(d, len(d) - 8, bytes(8))), "prompts do not ascend"),
    ],
)
def test_what_is_not_whole_and_sound_is_refused(
    image: bytes, tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parse_tables(change(image), "small")
    (tmp_path / "small").write_bytes(change(image))
    with pytest.raises(ModelLoadError):
        read_tables(tmp_path / "small")


def test_a_file_that_is_not_there_is_a_typed_error(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ModelLoadError, match="cannot be read"):
            read_tables(path)
    with pytest.raises(ModelLoadError, match="cannot write"):
        write_tables(toy_tables(), tmp_path / "no" / "folder")


def mutate(data: bytes, dice: random.Random) -> bytes:
    """A few bytes changed, cut off or doubled; mostly with the right size and checksum."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(changed))
        kind = dice.random()
        if kind < 0.6:
            changed[at] = dice.choice((0, 1, 127, 128, 255, dice.randrange(256)))
        elif kind < 0.8:
            value = dice.choice((0, 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1))
            field = struct.pack("<Q", value)[: len(changed) - at]
            changed[at : at + len(field)] = field
        elif kind < 0.9:
            del changed[at:]
        else:
            changed[at:at] = changed[at : at + dice.randint(1, 64)]
        if not changed:
            return b""
    if dice.random() < 0.8 and len(changed) > DATA_AT:
        changed[16:24] = struct.pack("<Q", len(changed))
        return signed(changed)
    return bytes(changed)


def draft_everywhere(tables: NgramTables) -> None:
    """Look up what the model may know, on both paths."""
    texts: list[Any] = [NgramText(NgramLookup(tables), 8, 4, 0.0)]
    if why_not_native() is None:
        native = native_module()
        made = native.NgramLookup(tables.levels, tables.unigrams, tables.is_backoff)
        texts.append(native.NgramText(made, 8, 4, 0.0))
    for text in texts:
        for token_ids in ([1, 2, 3, 1, 2], [1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 3, 4]):
            tokens, _, probs = text.draft(token_ids, 12, 4)
            assert all(0 <= token < max(5, tables.vocab_size) for token in tokens)
            assert all(0.0 <= prob <= 1.0 for prob in probs)


def fuzz(image: bytes, count: int, seed: int) -> int:
    """Read that many damaged files; returns how many were none the worse."""
    dice, survivors = random.Random(seed), 0
    for _ in range(count):
        try:
            tables = parse_tables(mutate(image, dice), "damaged")
        except ModelLoadError:
            continue
        draft_everywhere(tables)
        survivors += 1
    return survivors


def test_damaged_files_are_refused_or_harmless(image: bytes) -> None:
    survivors = fuzz(image, 2500, seed=1)
    assert 25 < survivors < 2250  # the checks behind the checksum are reached


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_damaged_files_are_refused_or_harmless(image: bytes) -> None:
    assert fuzz(image, 100_000, seed=2)


def test_both_programs_hash_contexts_alike() -> None:
    if (reason := why_not_native()) is not None:
        pytest.skip(reason)
    dice = random.Random(0)
    for length in (1, 2, 3, 4):
        for _ in range(50):
            context = [dice.getrandbits(32) for _ in range(length)]
            assert native_module().context_key(context) == context_key(context)
