"""From a smoothed model to the tables of a file, no larger than is wanted. Knows no files.

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
from paceline.proposers.ngram_model.tables import (
    CONTEXT_BYTES,
    CONTINUATION_BYTES,
    FIXED_BYTES,
    NO_PROMPTS,
    Level,
    NgramTables,
)
from paceline.training.ngram.counts import Floats, Ints, OrderCounts, sums
from paceline.training.ngram.smoothing import Smoothed, SmoothedOrder

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


def _level(counts: OrderCounts, order: SmoothedOrder, chosen: Ints) -> Level:
    context = counts.context_of[chosen]
    kept, sizes = np.unique(context, return_counts=True)
    return Level.of(
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
