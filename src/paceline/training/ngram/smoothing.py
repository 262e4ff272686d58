"""From counts to probabilities. Knows no files and no budget.

Modified Kneser-Ney smoothing, interpolated, with three discounts per order (Chen and Goodman, "An
empirical study of smoothing techniques for language modeling", 1998); orders below the highest
count in how many different contexts an n-gram occurs.

With soft labels counts are fractions. A discount then lies on the line between those of its whole
neighbours, from no discount of nothing on; an n-gram counts as one of different contexts by its
weight, where that is less than 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.training.ngram.counts import Floats, NgramCounts, OrderCounts, sums

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
    found = [0.0]
    for c in range(1, NUM_DISCOUNTS + 1):
        discount = c - (c + 1) * single * n[c + 1] / n[c] if n[c] and n[c + 1] else single
        found.append(min(float(c), max(0.0, discount)))
    return found
