"""One probability out of what several proposers say of one draft node. Knows no proposer.

Estimates of proposers that agree are not independent, how far is a matter of who agrees, and whom
the others do not follow is less to be trusted. So odds are pooled as a logistic regression on the
logarithms of the single ones, with an intercept and a slope per proposer, for each set of proposers
that named a node; children of one node compete with one another and with all other tokens, as in
Genest and Zidek, "Combining probability distributions" (1986), where this is the logarithmic pool.
All of it descends the gradient of the log-loss while it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, log

from paceline.policy.evidence import ORIGIN_SHIFT
from paceline.span import Claims, DraftTree

# On answers to public prompts twice these rates do as well, and half of them worse.
RATE = 0.05
SLOPE_RATE = 0.015
FIRST_LINES = ((0.0, 1.0), (0.5, 0.5))
"""Intercept and slopes, of a node that one proposer named and of one that several did."""
MAX_INTERCEPT = 4.0
MAX_SLOPE = 2.0
MAX_LOG_ODDS = 12.0
LEAST_ODDS = 0.005
MOST_ODDS = 200.0

Names = int | tuple[int, ...]
"""Number of the proposer that named a node, or of each in turn."""


class Pooling:
    """See the module's docstring. What it learns all requests share."""

    def __init__(self) -> None:
        self._lines: dict[Names, list[float]] = {}  # the intercept, then a slope per proposer

    def pool(self, tree: DraftTree) -> None:
        """Replace a merged tree's estimates in place. Siblings' sum to less than 1 afterwards."""
        odds, lines = [], self._lines
        for claims in tree.claims:
            if len(claims) == 1:  # most nodes: no more calls than it takes
                cell, _, said = claims[0]
                line = lines.get(cell >> ORIGIN_SHIFT) or self._line(claims)
                total = line[0] + line[1] * said
            else:
                line = self._line(claims)
                total = line[0]
                for at, claim in enumerate(claims, start=1):
                    total += line[at] * claim[2]
            odds.append(exp(total if total < MAX_LOG_ODDS else MAX_LOG_ODDS))
        tree.accept_probs = shared_out(odds, tree.parents)

    def learn(self, tree: DraftTree, outcomes: Iterable[tuple[int, float]]) -> None:
        """Take in which of a pooled tree's nodes were accepted (1.0) and which were not (0.0)."""
        for node, outcome in outcomes:
            claims, error = tree.claims[node], outcome - tree.accept_probs[node]
            line = self._line(claims)
            intercept = line[0] + RATE * error
            if -MAX_INTERCEPT < intercept < MAX_INTERCEPT:
                line[0] = intercept
            for at, (_, _, said) in enumerate(claims, start=1):
                slope = line[at] + SLOPE_RATE * error * said
                if 0.0 <= slope <= MAX_SLOPE:
                    line[at] = slope

    def _line(self, claims: Claims) -> list[float]:
        names: Names
        if len(claims) == 1:
            names = claims[0][0] >> ORIGIN_SHIFT
        else:
            names = tuple([claim[0] >> ORIGIN_SHIFT for claim in claims])
        line = self._lines.get(names)
        if line is None:
            intercept, slope = FIRST_LINES[len(claims) > 1]
            line = self._lines[names] = [intercept] + [slope] * len(claims)
        return line


def log_odds(odds: float) -> float:
    """Of odds, within limits: nobody is as sure as that."""
    if LEAST_ODDS < odds < MOST_ODDS:
        return log(odds)
    return log(LEAST_ODDS if odds <= LEAST_ODDS else MOST_ODDS)


def shared_out(odds: Sequence[float], parents: Sequence[int]) -> list[float]:
    """Probabilities of nodes from their odds against tokens that were not drafted there."""
    total = [1.0] * (len(odds) + 1)  # by parent; the last place is that of ROOT, which is -1
    for parent, each in zip(parents, odds, strict=True):
        total[parent] += each
    return [each / total[parent] for parent, each in zip(parents, odds, strict=True)]


def limit_siblings(tree: DraftTree) -> None:
    """Scale siblings' estimates down where they sum to more than 1."""
    probs, parents = tree.accept_probs, tree.parents
    total = [0.0] * (len(probs) + 1)  # by parent; the last place is that of ROOT, which is -1
    for parent, prob in zip(parents, probs, strict=True):
        total[parent] += prob
    if max(total) > 1.0:
        tree.accept_probs = [
            prob / max(1.0, total[parent]) for parent, prob in zip(parents, probs, strict=True)
        ]
