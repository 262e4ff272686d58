"""N-grams of a corpus that is counted piece by piece: memory follows what is counted, not its text.

Each piece is counted by :mod:`paceline.training.ngram.counts`, and its counts are added to those of
the pieces before. Knows no probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paceline.core.errors import TrainingError
from paceline.training.ngram.counts import (
    Corpus,
    Example,
    Ints,
    NgramCounts,
    OrderCounts,
    count_ngrams,
)

PIECE_TOKENS = 1 << 20


def count_examples(
    examples: Sequence[Example],
    order: int,
    vocab_size: int,
    *,
    is_soft: bool = False,
    piece_tokens: int = PIECE_TOKENS,
) -> NgramCounts:
    """Count the n-grams of whole texts, so many tokens at a time."""
    total = None
    for piece in _pieces(examples, piece_tokens):
        counts = count_ngrams(Corpus.of(piece, is_soft=is_soft), order, vocab_size)
        total = counts if total is None else added(total, counts)
    if total is None:
        raise TrainingError("there are no tokens to learn from")
    return total


def _pieces(examples: Sequence[Example], piece_tokens: int) -> Iterator[list[Example]]:
    piece, size = list[Example](), 0
    for example in examples:
        if len(example.tokens) > example.start:
            piece.append(example)
            size += len(example.tokens)
        if size >= piece_tokens:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def added(one: NgramCounts, other: NgramCounts) -> NgramCounts:
    """The counts of two corpora of the same vocabulary, as if they were one."""
    vocab_size = one.vocab_size
    keys: list[Ints] = []  # of the contexts of each length, ascending, as they are numbered
    numbers = [np.zeros(1, np.int64)] * 2  # of each one's contexts of one length, in the sum
    orders: list[OrderCounts] = []
    for pair in zip(one.orders, other.orders, strict=True):
        contexts = np.concatenate([each.contexts for each in pair])  # [contexts, length]
        if not orders:  # the empty context alone, which has no shorter one
            contexts, shorter = contexts[:1], np.zeros(0, np.int64)
        else:
            below = [to[each.shorter] for to, each in zip(numbers, pair, strict=True)]
            mixed = _context_keys(contexts, keys, vocab_size)
            unique, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
            keys.append(unique)
            numbers = np.split(inverse, [len(pair[0].contexts)])
            contexts, shorter = contexts[first], np.concatenate(below)[first]
        added = [
            to[each.context_of] * vocab_size + each.tokens
            for to, each in zip(numbers, pair, strict=True)
        ]
        weights = np.concatenate([each.weights for each in pair])
        beginnings = np.concatenate([each.beginnings for each in pair])
        counts = (np.concatenate(added), weights, beginnings)
        lower = orders[-1] if orders else None
        orders.append(OrderCounts.of(contexts, shorter, *counts, lower, vocab_size))
    return NgramCounts(vocab_size, one.num_tokens + other.num_tokens, tuple(orders))


def _context_keys(contexts: Ints, keys: Sequence[Ints], vocab_size: int) -> Ints:
    """The number of each context without its last token, and that token, in one number."""
    number = np.zeros(len(contexts), np.int64)
    for place, known in enumerate(keys):
        number = np.searchsorted(known, number * vocab_size + contexts[:, place])
    return number * vocab_size + contexts[:, -1]
