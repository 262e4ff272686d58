"""N-gram files of other programs: what they say is said here, and damage is refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import xxhash

from paceline.core.errors import ModelLoadError
from paceline.proposers.ngram_model import NgramLookup
from paceline_lab.train.ngram.counts import OrderCounts
from paceline_lab.train.ngram.estimation import prune, smooth
from paceline_lab.train.ngram.exchange import read_llama_lookup, read_uzu, write_llama_lookup
from tests.lab.train.test_ngram import VOCAB, WHOLE, Gram, counts_of, texts


def uzu_table(n: int, contexts: dict[Gram, dict[int, float]], slots: int = 7, k: int = 2) -> bytes:
    tags, counts = [0] * slots, [0] * slots
    keys, values = [0] * (slots * k), [0.0] * (slots * k)
    for context, continuations in contexts.items():
        key = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(context)}I", *context))
        slot = key % slots
        assert not counts[slot], "the test's contexts must not share a slot"
        tags[slot], counts[slot] = key // slots, 3
        for at, (token, value) in enumerate(continuations.items(), start=slot * k):
            keys[at], values[at] = token, value
    body = struct.pack("<4I", slots, k, n, 2**32 - 1)
    body += struct.pack(f"<{slots}Q", *tags) + struct.pack(f"<{slots * k}I", *keys)
    body += struct.pack(f"<{slots * k}f", *values) + struct.pack(f"<{slots}I", *counts)
    return struct.pack("<Q", len(body)) + body


def uzu_file() -> bytes:
    tables = [
        uzu_table(1, {(): {4: 0.75, 1: 0.25}}),
        uzu_table(2, {(4,): {2: 0.5, 1: 0.5}, (2,): {5: 1.0}}),
        uzu_table(3, {(4, 2): {3: 0.875, 5: 0.125}}),
    ]
    return struct.pack("<If", 3, 0.002) + b"".join(tables)


def test_a_model_of_uzu_says_the_same_here(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(uzu_file())
    tables = read_uzu(tmp_path / "model.bin", VOCAB, None)
    model = NgramLookup(tables)
    assert (tables.order, tables.vocab_size) == (3, VOCAB)
    expected = {
        (0, 4): {2: 0.5, 1: 0.5},
        (1, 2): {5: 1.0},
        (4, 2): {3: 0.875, 5: 0.125},  # the longest context alone decides
        (0, 0): {4: 0.75, 1: 0.25},
    }
    for context, probs in expected.items():
        found = {token: model.probability(context, token) for token in range(VOCAB)}
        assert {token: prob for token, prob in found.items() if prob} == probs
    assert model.draft(None, [4, 2], 9, 1, 4, 0.0)[0] == [3, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"", "too short"),
        (lambda d: d[:40], "impossible sizes"),
        (lambda d: struct.pack("<I", 9) + d[4:], "order 9"),
        (lambda d: d + b"\0", "goes on"),
        (lambda d: d[:8] + b"\xff" * 12 + d[20:], "impossible sizes"),
        (
            lambda d: d.replace(struct.pack("<f", 0.75), struct.pack("<f", -1.0)),
            "not a probability",
        ),
        (lambda d: d.replace(struct.pack("<I", 4), struct.pack("<I", 600)), "a token 600"),
    ],
)
def test_a_damaged_model_of_uzu_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    (tmp_path / "model.bin").write_bytes(change(uzu_file()))
    with pytest.raises(ModelLoadError, match=message):
        read_uzu(tmp_path / "model.bin", VOCAB, None)


def llama_record(context: Gram, continuations: dict[int, int]) -> bytes:
    pairs = [number for pair in continuations.items() for number in pair]
    places = [*context, *[-1] * (4 - len(context))]
    return struct.pack(f"<5i{len(pairs)}i", *places, len(continuations), *pairs)


def test_a_lookup_cache_of_llama_is_read_with_its_counts(tmp_path: Path) -> None:
    path = tmp_path / "cache.bin"
    path.write_bytes(llama_record((1, 2), {3: 3, 4: 1}) + llama_record((2, 2), {3: 2}))
    counts = read_llama_lookup(path, VOCAB)
    assert [len(order.tokens) for order in counts.orders] == [2, 2, 3]
    pairs, triples = counts.orders[1:]
    assert _weights(triples) == {(1, 2, 3): 3.0, (1, 2, 4): 1.0, (2, 2, 3): 2.0}
    assert _weights(pairs) == {(2, 3): 5.0, (2, 4): 1.0}  # counted from both contexts
    assert NgramLookup(prune(smooth(counts, 3), 8, WHOLE)).probability([1, 2], 3) > 0.5


def _weights(order: OrderCounts) -> dict[Gram, float]:
    contexts = order.contexts[order.context_of].tolist()
    grams = [(*context, token) for context, token in zip(contexts, order.tokens, strict=True)]
    return dict(zip(grams, order.weights.tolist(), strict=True))


def test_counts_come_back_from_a_lookup_cache(tmp_path: Path) -> None:
    corpus = texts(7)
    counts = counts_of(corpus, 4)
    write_llama_lookup(counts, tmp_path / "cache.bin")
    again = read_llama_lookup(tmp_path / "cache.bin", VOCAB)
    for before, after in zip(counts.orders[1:], again.orders[1:], strict=True):
        contexts = {tuple(each) for each in before.contexts[before.context_of].tolist()}
        assert contexts == {tuple(each) for each in after.contexts.tolist()}
        assert before.weights.tolist() == after.weights.tolist()
    models = [NgramLookup(prune(smooth(each, 4), 64, WHOLE)) for each in (counts, again)]
    for context in product(range(3), repeat=3):
        # A cache does not say how texts began.
        assert models[0].probability(context, 1) == pytest.approx(
            models[1].probability(context, 1), rel=0.1
        )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        struct.pack("<5i", 1, -1, -1, -1, 1),
        struct.pack("<4i", 1, -1, -1, -1),
        struct.pack("<5i", 1, -1, -1, -1, -1),
        struct.pack("<5i", 1, -1, -1, -1, 0),
        struct.pack("<7i", 1, -1, -1, -1, 1 << 30, 1, 1),
        struct.pack("<7i", -1, -1, -1, -1, 1, 1, 1),
        struct.pack("<7i", 1, -1, 2, -1, 1, 1, 1),
        struct.pack("<7i", 1, -1, -1, -1, 1, 1, 0),
        struct.pack("<7i", 1, -1, -1, -1, 1, 700, 1),
        struct.pack("<7i", -5, -1, -1, -1, 1, 1, 1),
    ],
)
def test_a_damaged_lookup_cache_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "cache.bin").write_bytes(data)
    with pytest.raises(ModelLoadError):
        read_llama_lookup(tmp_path / "cache.bin", VOCAB)


def test_damage_anywhere_is_a_typed_error(tmp_path: Path) -> None:
    dice, path = random.Random(1), tmp_path / "damaged"
    write_llama_lookup(counts_of(texts(8, 1, 20), 3), path)
    readers = [(path.read_bytes(), read_llama_lookup), (uzu_file(), read_uzu)]
    for data, read in readers:
        for _ in range(200):
            damaged = bytearray(data)
            for _ in range(dice.randint(1, 3)):
                damaged[dice.randrange(len(damaged))] = dice.choice((0, 1, 127, 255))
            path.write_bytes(damaged[: dice.choice((None, None, dice.randrange(len(damaged))))])
            try:
                read(path, VOCAB, *(() if read is read_llama_lookup else (None,)))
            except ModelLoadError:
                continue
