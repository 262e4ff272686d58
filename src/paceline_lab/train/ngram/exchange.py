"""N-gram files of other programs: what they hold, in our terms. Knows no options and no figures.

They are untrusted: every count is checked against the file's size before it is used, and nothing is
allocated that is not in proportion to that size. All numbers are little endian.

``model.bin`` of uzu and lalamo, version 2: u32 order, f32 discount, then a table per order n, from
1 on: u64 bytes of what follows | u32 slots S, u32 k, u32 n, u32 padding token | u64 tags [S] | u32
tokens [S, k] | f32 values [S, k] | u32 counts [S]. The XXH3-64 hash h of a context of n - 1 tokens,
as u32, has its slot at ``h % S`` and the tag ``h / S``, so both give the hash back, which is our
key. A value of 0 is padding.

Lookup caches of llama.cpp: records without a header: i32 tokens [4], the context, filled up with -1
| i32 pairs | pairs of i32 token, i32 count.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.speculative import MAX_CONTINUATIONS, NGRAM_ORDERS
from paceline.core.errors import ModelLoadError
from paceline.core.files import whole_file
from paceline.proposers.ngram_model import NgramLevel, NgramTables, context_key
from paceline_lab.train.ngram.counts import NgramCounts, OrderCounts

LLAMA_CONTEXT = 4
"""Places for the tokens of a context in llama.cpp's lookup caches."""

Continuations = dict[int, float]
Grams = dict[tuple[int, ...], Continuations]


def read_uzu(path: str | Path, vocab_size: int, fingerprint: str | None) -> NgramTables:
    """The tables of a ``model.bin``, version 2, of uzu: the longest context alone decides there.

    Raises:
        ModelLoadError: it cannot be read, is damaged, has other orders than we have, or a token
            outside the vocabulary.
    """
    data = _read(path)
    if len(data) < 8:
        raise ModelLoadError(f"{path} is too short for a model.bin")
    (order,) = struct.unpack_from("<I", data)
    least, most = NGRAM_ORDERS
    if not least <= order <= most:
        raise ModelLoadError(f"{path} has order {order}; allowed: orders {least} to {most}")
    at, tables = 8, []
    for n in range(1, order + 1):
        table, at = _uzu_table(data, at, n, str(path))
        tables.append(table)
    if at != len(data):
        raise ModelLoadError(f"{path} is damaged: it goes on after its last table")
    highest = max((int(tokens.max()) for _, _, tokens, _ in tables if len(tokens)), default=-1)
    _check_token(highest, vocab_size, path)
    unigrams = np.zeros(vocab_size, np.float32)
    np.maximum.at(unigrams, tables[0][2], tables[0][3])
    levels = [
        NgramLevel.of(keys, counts, np.zeros(len(keys), np.float32), tokens, values)
        for keys, counts, tokens, values in tables[1:]
    ]
    return NgramTables(fingerprint, False, 0, unigrams, tuple(levels))


_UzuTable = tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint32], NDArray[np.float32]]


def _uzu_table(data: bytes, at: int, n: int, name: str) -> tuple[_UzuTable, int]:
    """Keys, numbers of continuations, their tokens and values; and where the table ends."""
    if len(data) - at < 24:
        raise ModelLoadError(f"{name} is damaged: the table of order {n} is missing")
    size, slots, k, stated, _ = struct.unpack_from("<QIIII", data, at)
    begin, end = at + 24, at + 8 + size
    if stated != n or size != 16 + slots * (12 + 8 * k) or end > len(data) or not slots * k:
        raise ModelLoadError(f"{name} is damaged: the table of order {n} has impossible sizes")
    tags = np.frombuffer(data, "<u8", slots, begin)
    tokens = np.frombuffer(data, "<u4", slots * k, begin + 8 * slots).reshape(slots, k)
    values = np.frombuffer(data, "<f4", slots * k, begin + (8 + 4 * k) * slots).reshape(slots, k)
    if not ((values >= 0.0) & (values <= 1.0)).all():
        raise ModelLoadError(f"{name} is damaged: a value of order {n} is not a probability")
    if n == 1:  # the empty context is in one slot of the table
        tokens = tokens[[context_key(()) % slots]]
        values, tags = values[[context_key(()) % slots]], tags[:1]
    order = np.argsort(-values, axis=1, kind="stable")[:, :MAX_CONTINUATIONS]
    tokens, values = np.take_along_axis(tokens, order, 1), np.take_along_axis(values, order, 1)
    listed = values > 0.0
    used = listed.any(1)
    keys = np.arange(len(tags), dtype=np.uint64)
    keys += tags * np.uint64(slots)
    return (keys[used], listed.sum(1)[used], tokens[listed], values[listed]), end


def read_llama_lookup(path: str | Path, vocab_size: int) -> NgramCounts:
    """The counts in a lookup cache of llama.cpp.

    What has no shorter n-gram in the file is counted there, too.

    Raises:
        ModelLoadError: it cannot be read, is damaged, or has a token outside the vocabulary.
    """
    grams: list[Grams] = [{} for _ in range(LLAMA_CONTEXT + 1)]
    for context, continuations in _llama_records(_read(path), str(path)):
        if continuations:
            grams[len(context)].setdefault(context, {}).update(continuations)
    while len(grams) > 1 and not grams[-1]:
        grams.pop()
    if len(grams) == 1:
        raise ModelLoadError(f"{path} holds no n-grams")
    for above, below in zip(grams[:0:-1], grams[-2::-1], strict=True):
        _count_suffixes(above, below)
    highest = max(token for each in grams for of in each.values() for token in of)
    highest = max(highest, *(token for each in grams[1:] for context in each for token in context))
    _check_token(highest, vocab_size, path)
    orders: list[OrderCounts] = []
    for each, above in zip(grams, [*grams[1:], {}], strict=True):
        orders.append(_order_counts(each, above, orders[-1] if orders else None, vocab_size))
    return NgramCounts(vocab_size, round(orders[0].weights.sum()), tuple(orders))


def _llama_records(data: bytes, name: str) -> Iterator[tuple[tuple[int, ...], Continuations]]:
    if len(data) % 4:
        raise ModelLoadError(f"{name} is damaged: it is not made of whole numbers")
    numbers = np.frombuffer(data, "<i4").tolist()
    at = 0
    while at < len(numbers):
        places = numbers[at : at + LLAMA_CONTEXT]
        context = tuple(places[: places.index(-1)] if -1 in places else places)
        begin = at + LLAMA_CONTEXT + 1
        count = numbers[begin - 1] if begin <= len(numbers) else -1
        end = begin + 2 * count
        if (
            count < 0
            or end > len(numbers)
            or not context
            or min(context) < 0
            or {*places[len(context) :]} - {-1}
        ):
            raise ModelLoadError(f"{name} is damaged: there is no record at byte {4 * at}")
        tokens, counts = numbers[begin:end:2], numbers[begin + 1 : end : 2]
        if count and (min(tokens) < 0 or min(counts) < 1):
            raise ModelLoadError(f"{name} is damaged: a count at byte {4 * at} is none")
        yield context, dict(zip(tokens, map(float, counts), strict=True))
        at = end


def _count_suffixes(above: Grams, below: Grams) -> None:
    """Add what one order has and the order below has not."""
    known = {context: set(of) for context, of in below.items()}
    for context, continuations in above.items():
        shorter = below.setdefault(context[1:], {})
        there = known.get(context[1:], set())
        for token, count in continuations.items():
            if token not in there:
                shorter[token] = shorter.get(token, 0.0) + count


def _order_counts(
    grams: Grams, above: Grams, lower: OrderCounts | None, vocab_size: int
) -> OrderCounts:
    contexts = sorted(context for context, of in grams.items() if of)
    extended = {(context[1:], token) for context, of in above.items() for token in of}
    rows = [
        (number, token, grams[context][token], (context, token) not in extended)
        for number, context in enumerate(contexts)
        for token in sorted(grams[context])
    ]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    context_of, tokens, weights, is_first = columns
    table = np.array(contexts, np.int64).reshape(len(contexts), -1)
    shorter = np.zeros(0, np.int64)
    if lower is not None:
        numbers = {tuple(each): number for number, each in enumerate(lower.contexts.tolist())}
        shorter = np.array([numbers[context[1:]] for context in contexts])
    firsts = np.where(is_first, weights, 0.0)
    keys = context_of * vocab_size + tokens
    return OrderCounts.of(table, shorter, keys, weights, firsts, lower, vocab_size)


def write_llama_lookup(counts: NgramCounts, path: str | Path) -> None:
    """Write counts as a lookup cache of llama.cpp, contexts of 1 to 4 tokens."""
    parts = []
    for order in counts.orders[1 : LLAMA_CONTEXT + 1]:
        length = order.contexts.shape[1]
        contexts = np.full((len(order.contexts), LLAMA_CONTEXT), -1, "<i4")
        contexts[:, :length] = order.contexts
        whole = np.maximum(1, np.rint(order.weights)).astype("<i4")
        pairs = np.stack([order.tokens.astype("<i4"), whole], 1)
        ends = np.cumsum(np.bincount(order.context_of, minlength=len(contexts))).tolist()
        begin = 0
        for context, end in zip(contexts, ends, strict=True):
            if end > begin:
                parts += [context.tobytes(), struct.pack("<i", end - begin)]
                parts.append(pairs[begin:end].tobytes())
            begin = end
    with whole_file(path, ModelLoadError) as partial:
        partial.write_bytes(b"".join(parts))


def _check_token(highest: int, vocab_size: int, path: str | Path) -> None:
    if highest >= vocab_size:
        raise ModelLoadError(
            f"{path} has a token {highest} and the vocabulary has {vocab_size}; it is "
            "damaged, or of another tokenizer than the target's"
        )


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
