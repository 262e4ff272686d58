"""N-grams of tokens and how often they occur, all orders at once. Knows no probabilities.

The *contexts* of m tokens are numbered, and so are the n-grams of each order: a context with one
token after it. Everything is sorted and counted by numpy; a million tokens take seconds. A corpus
may be counted piece by piece, so that memory follows what is counted and not its text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import TrainingError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


LEAST_LABEL = 1e-3
"""Soft labels below this are left out: what is less likely is never drafted."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One text, and what is to be learnt of it.

    Attributes:
        tokens: of the whole text ``[n]``.
        start: the first token to learn; those before it are context.
        top_ids, top_probs: the likeliest tokens at each place from there on, and how likely the
            target found them ``[n - start, k]``; None where only the tokens themselves are known.
    """

    tokens: NDArray[np.int32]
    start: int = 0
    top_ids: NDArray[np.int32] | None = None
    top_probs: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Texts as tokens, and what is to be learnt of them.

    Attributes:
        tokens: of all texts, one after another ``[total]``.
        offsets: where each text begins and ends ``[texts + 1]``.
        positions, labels, weights: what followed the tokens before a position, and how surely; for
            each position the weights sum to at most 1 ``[labels]``.
    """

    tokens: NDArray[np.int32]
    offsets: Ints
    positions: Ints
    labels: Ints
    weights: Floats

    @classmethod
    def of(cls, examples: Sequence[Example], *, is_soft: bool = False) -> Corpus:
        """Labels are the tokens themselves, or where they are known the target's probabilities."""
        offsets = np.cumsum([0, *(len(each.tokens) for each in examples)])
        parts = [
            _soft_labels(each, begin) if is_soft else _labels(each, begin)
            for each, begin in zip(examples, offsets.tolist(), strict=False)
        ]
        tokens = np.concatenate([np.zeros(0, np.int32), *(each.tokens for each in examples)])
        nothing = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
        columns = zip(nothing, *parts, strict=True)
        return cls(tokens, offsets, *map(np.concatenate, columns))


def _labels(example: Example, begin: int) -> tuple[Ints, Ints, Floats]:
    labels = example.tokens[example.start :].astype(np.int64)
    positions = np.arange(example.start, len(example.tokens)) + begin
    return positions, labels, np.ones(len(labels))


def _soft_labels(example: Example, begin: int) -> tuple[Ints, Ints, Floats]:
    if example.top_ids is None or example.top_probs is None:
        return _labels(example, begin)
    probs = example.top_probs.astype(np.float64)
    probs /= np.maximum(1.0, probs.sum(1, keepdims=True))
    rows, columns = np.nonzero(probs > LEAST_LABEL)
    labels = example.top_ids[rows, columns].astype(np.int64)
    return rows + (example.start + begin), labels, probs[rows, columns]


@dataclass(frozen=True, slots=True, eq=False)
class OrderCounts:
    """The n-grams of one order.

    Attributes:
        contexts: tokens of each context ``[contexts, n - 1]``.
        shorter: number of the context without its first token, one order below ``[contexts]``.
        context_of, tokens: of each n-gram, in ascending order ``[n-grams]``.
        weights: how often each n-gram occurs.
        beginnings: how often with no token before it.
        suffixes: number of the n-gram without its first token, one order below.
    """

    contexts: NDArray[np.int64]
    shorter: Ints
    context_of: Ints
    tokens: Ints
    weights: Floats
    beginnings: Floats
    suffixes: Ints

    @classmethod
    def of(
        cls,
        contexts: NDArray[np.int64],
        shorter: Ints,
        keys: Ints,
        weights: Floats,
        beginnings: Floats,
        lower: OrderCounts | None,
        vocab_size: int,
    ) -> OrderCounts:
        """Add up what was counted, in any order.

        Args:
            keys: of each count the number of its context times ``vocab_size``, plus its token.
            lower: the order below; None at the lowest.
        """
        ngrams, places = np.unique(keys, return_inverse=True)
        context_of, tokens = np.divmod(ngrams, vocab_size)
        suffixes = np.zeros(0, np.int64)
        if lower is not None:
            known = lower.context_of * vocab_size + lower.tokens
            numbers = np.searchsorted(known, shorter[context_of] * vocab_size + tokens)
            suffixes = numbers.astype(np.int64)
        size = len(ngrams)
        summed = sums(places, weights, size), sums(places, beginnings, size)
        return cls(contexts, shorter, context_of, tokens, *summed, suffixes)


@dataclass(frozen=True, slots=True, eq=False)
class NgramCounts:
    """Counts of orders 1, 2, and so on, of ``vocab_size`` tokens and ``num_tokens`` labels."""

    vocab_size: int
    num_tokens: int
    orders: tuple[OrderCounts, ...]


def sums(places: Ints, values: Floats, size: int) -> Floats:
    """At each place, the sum of the values that belong there ``[size]``."""
    return np.bincount(places, values, size).astype(np.float64, copy=False)


def count_ngrams(corpus: Corpus, order: int, vocab_size: int) -> NgramCounts:
    """Count the n-grams of all orders up to ``order``."""
    if not len(corpus.positions):
        raise TrainingError("there are no tokens to learn from")
    lowest = min(corpus.tokens.min(), corpus.labels.min())
    highest = max(corpus.tokens.max(), corpus.labels.max())
    if lowest < 0 or highest >= vocab_size:
        raise TrainingError(
            f"token ids go from {lowest} to {highest}; the vocabulary has {vocab_size}"
        )
    tokens = corpus.tokens.astype(np.int64)
    place = np.arange(len(tokens)) - np.repeat(corpus.offsets[:-1], np.diff(corpus.offsets))
    context = np.zeros(len(tokens), np.int64)
    orders = [_count(corpus, context, place, 0, np.zeros(1, np.int64), (), vocab_size)]
    for length in range(1, order):
        long_enough = np.flatnonzero(place >= length)
        keys = context[long_enough - 1] * vocab_size + tokens[long_enough - 1]
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        examples, shorter = long_enough[first], context[long_enough[first]]
        context = np.full(len(tokens), -1)
        context[long_enough] = inverse
        below = orders[-1]
        orders.append(
            _count(corpus, context, place, length, examples, (shorter, below), vocab_size)
        )
    return NgramCounts(vocab_size, round(corpus.weights.sum()), tuple(orders))


def _count(
    corpus: Corpus,
    context: Ints,
    place: Ints,
    length: int,
    examples: Ints,
    below: tuple[()] | tuple[Ints, OrderCounts],
    vocab_size: int,
) -> OrderCounts:
    """The n-grams with a context of ``length`` tokens; ``examples`` are positions after each.

    ``context`` numbers the one before each position, -1 where the text is too short; ``place`` is
    a position's in its text; ``below`` has the contexts without their first token, and their order.
    """
    seen = context[corpus.positions] >= 0
    positions, weights = corpus.positions[seen], corpus.weights[seen]
    keys = context[positions] * vocab_size + corpus.labels[seen]
    at_start = np.where(place[positions] == length, weights, 0.0)
    shorter, lower = below or (np.zeros(0, np.int64), None)
    contexts = corpus.tokens[examples[:, None] + np.arange(-length, 0)].astype(np.int64)
    return OrderCounts.of(contexts, shorter, keys, weights, at_start, lower, vocab_size)


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
