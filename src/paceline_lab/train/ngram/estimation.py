"""From counts of n-grams to the tables of a file, no larger than is wanted. Knows no files.

Modified Kneser-Ney smoothing, interpolated, with three discounts per order (Chen and Goodman, "An
empirical study of smoothing techniques for language modeling", 1998); orders below the highest
count in how many different contexts an n-gram occurs. With soft labels counts are fractions. A
discount then lies on the line between those of its whole neighbours, from no discount of nothing
on; an n-gram counts as one of different contexts by its weight, where that is less than 1.

Of each context the likeliest continuations are kept. Where that is still too much, those go first
whose loss costs the least likelihood of the training text: how often the n-gram occurs, times the
logarithm of what it gains over the order below (Seymore and Rosenfeld, "Scalable backoff language
models", 1996). What a context loses goes to the order below, so that probabilities still sum to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.core.errors import TrainingError
from paceline.proposers.ngram_model import (
    CONTEXT_BYTES,
    CONTINUATION_BYTES,
    FIXED_BYTES,
    NO_PROMPTS,
    NgramLevel,
    NgramTables,
)
from paceline_lab.train.ngram.counts import Floats, Ints, NgramCounts, OrderCounts, sums

NUM_DISCOUNTS = 3
_DEFAULT_DISCOUNT = 0.5
"""Where too few n-grams are rare to estimate one."""


@dataclass(frozen=True, slots=True, eq=False)
class SmoothedOrder:
    """The probabilities of one order above the first.

    Attributes:
        values: of each n-gram: its own part of the probability.
        lower_weights: what each context leaves to the order below.
        probs: of each n-gram, all orders taken together.
        lower_probs: of each n-gram without its first token.
    """

    values: Floats
    lower_weights: Floats
    probs: Floats
    lower_probs: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Smoothed:
    """A model of every n-gram that was counted: unigrams ``[vocabulary]``, orders from 2 on."""

    counts: NgramCounts
    unigrams: Floats
    orders: tuple[SmoothedOrder, ...]


def smooth(counts: NgramCounts, order: int) -> Smoothed:
    """A model of orders 1 to ``order``, no more than were counted."""
    orders = counts.orders[:order]
    first = orders[0]
    values, left = _share(first, _counts_of(orders, 0))
    unigrams = np.full(counts.vocab_size, left[0] / counts.vocab_size)
    unigrams[first.tokens] += values
    smoothed: list[SmoothedOrder] = []
    lower_probs = unigrams[first.tokens]
    for at, each in enumerate(orders[1:], start=1):
        values, left = _share(each, _counts_of(orders, at))
        lower = lower_probs[each.suffixes]
        probs = values + left[each.context_of] * lower
        smoothed.append(SmoothedOrder(values, left, probs, lower))
        lower_probs = probs
    return Smoothed(counts, unigrams, tuple(smoothed))


def _counts_of(orders: tuple[OrderCounts, ...], at: int) -> Floats:
    """What an order's probabilities are shares of."""
    here = orders[at]
    if at == len(orders) - 1:
        return here.weights
    above = orders[at + 1]
    contexts = sums(above.suffixes, np.minimum(above.weights, 1.0), len(here.weights))
    return contexts + np.minimum(here.beginnings, 1.0)


def _share(order: OrderCounts, counts: Floats) -> tuple[Floats, Floats]:
    """Each n-gram's own part of the probability, and what each context leaves."""
    size = len(order.contexts)
    totals = sums(order.context_of, counts, size)
    seen = np.where(totals > 0.0, totals, 1.0)
    steps = _discounts(counts)
    taken = np.interp(counts, range(len(steps)), steps)
    left = np.where(totals > 0.0, sums(order.context_of, taken, size) / seen, 1.0)
    return (counts - taken) / seen[order.context_of], left


def _discounts(counts: Floats) -> list[float]:
    """Discounts of the counts 0, 1, and so on, the last one of all higher counts too.

    Where no n-gram occurs once or none twice, or a discount's own formula fails, it is the single
    discount of absolute discounting, and one half where that fails.
    """
    whole = np.rint(counts).astype(np.int64)
    n = np.bincount(whole[whole <= 4], minlength=5).astype(float).tolist()
    single = n[1] / (n[1] + 2 * n[2]) if n[1] and n[2] else _DEFAULT_DISCOUNT
    discounts = [0.0]
    for c in range(1, NUM_DISCOUNTS + 1):
        discount = c - (c + 1) * single * n[c + 1] / n[c] if n[c] and n[c + 1] else single
        discounts.append(min(float(c), max(0.0, discount)))
    return discounts


UNIGRAM_BYTES = 4


@dataclass(slots=True, eq=False)
class _Candidates:
    """The continuations of one order that may be kept, of each context the likeliest first."""

    chosen: Ints
    losses: Floats


def prune(
    smoothed: Smoothed,
    top_k: int,
    max_bytes: int,
    fingerprint: str | None = None,
    prompts: NDArray[np.uint64] = NO_PROMPTS,
) -> NgramTables:
    """The tables of a file of at most ``max_bytes``.

    Args:
        prompts: keys of those whose answers were learnt, ascending; they are part of the file.

    Raises:
        TrainingError: not even the unigrams and prompts fit.
    """
    vocab_size = smoothed.counts.vocab_size
    room = max_bytes - FIXED_BYTES - UNIGRAM_BYTES * vocab_size - prompts.nbytes
    if room < 0:
        raise TrainingError(
            f"{max_bytes} bytes are too few for a vocabulary of {vocab_size} and {len(prompts)} "
            f"prompts; the least is {max_bytes - room}"
        )
    pairs = list(zip(smoothed.counts.orders[1:], smoothed.orders, strict=False))
    candidates = [_likeliest(*pair, top_k) for pair in pairs]
    _fit(candidates, [counts for counts, _ in pairs], room)
    levels = [
        _level(counts, order, each.chosen)
        for (counts, order), each in zip(pairs, candidates, strict=True)
    ]
    return NgramTables(
        fingerprint,
        False,
        smoothed.counts.num_tokens,
        np.clip(smoothed.unigrams, 0.0, 1.0).astype(np.float32),
        tuple(levels),
        prompts,
    )


def _likeliest(counts: OrderCounts, order: SmoothedOrder, top_k: int) -> _Candidates:
    """The ``top_k`` continuations of each context, and what it would cost to lose each of them."""
    ranked = np.lexsort((counts.tokens, -order.values, counts.context_of))
    ranked = ranked[order.values[ranked] > 0.0]
    context = counts.context_of[ranked]
    chosen = ranked[_rank_in_run(context) < top_k]
    left = _left(counts, order, chosen)
    weight = left[counts.context_of[chosen]]
    value, lower = order.values[chosen], order.lower_probs[chosen]
    with np.errstate(divide="ignore"):
        gain = np.log(value + weight * lower) - np.log((weight + value) * lower)
    return _Candidates(chosen, counts.weights[chosen] * gain)


def _rank_in_run(values: Ints) -> Ints:
    """Of each element its place among the equal neighbours that it stands in."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    return np.arange(len(values)) - np.repeat(starts, np.diff(starts, append=len(values)))


def _left(counts: OrderCounts, order: SmoothedOrder, chosen: Ints) -> Floats:
    """What each context leaves to the order below if those n-grams are kept alone."""
    kept = sums(counts.context_of[chosen], order.values[chosen], len(counts.contexts))
    return np.clip(1.0 - kept, 0.0, 1.0)


def _fit(candidates: list[_Candidates], counts: list[OrderCounts], room: int) -> None:
    """Keep as many candidates as have room, those with the largest losses."""
    losses = np.concatenate([each.losses for each in candidates])
    places = np.empty(len(losses), np.int64)
    places[np.argsort(-losses, kind="stable")] = np.arange(len(losses))
    ends = np.cumsum([len(each.losses) for each in candidates])
    parts = np.split(places, ends[:-1])
    firsts = [
        np.minimum.reduceat(part, np.flatnonzero(np.diff(context, prepend=-1)))
        for part, context in (
            (part, of.context_of[each.chosen])
            for part, each, of in zip(parts, candidates, counts, strict=True)
        )
        if len(part)
    ]
    # Of the first so many candidates, this many bring a context that none before them had.
    brings = np.zeros(len(losses), np.int64)
    for first in firsts:
        brings[first] = 1
    bytes_of = np.cumsum(CONTINUATION_BYTES + CONTEXT_BYTES * brings)
    most = int(np.searchsorted(bytes_of, room, side="right"))
    for part, each in zip(parts, candidates, strict=True):
        each.chosen = each.chosen[part < most]


def _level(counts: OrderCounts, order: SmoothedOrder, chosen: Ints) -> NgramLevel:
    context = counts.context_of[chosen]
    kept, sizes = np.unique(context, return_counts=True)
    return NgramLevel.of(
        context_keys(counts.contexts[kept]),
        sizes,
        _left(counts, order, chosen)[kept].astype(np.float32),
        counts.tokens[chosen].astype(np.uint32),
        np.clip(order.values[chosen], 0.0, 1.0).astype(np.float32),
    )


def context_keys(contexts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The keys of contexts of one length ``[contexts, tokens]``."""
    width = 4 * contexts.shape[1]
    data = np.ascontiguousarray(contexts, "<u4").tobytes()
    hashes = (xxhash.xxh3_64_intdigest(data[at : at + width]) for at in range(0, len(data), width))
    return np.fromiter(hashes, np.uint64, len(contexts))
