"""What may follow a context, by a trained model and by the request's own text. Knows no requests.

Both are interpolated from the shortest context to the longest. At each length the model speaks
first (:class:`~paceline.proposers.ngram_model.tables.NgramTables` says how), then the text by
Witten and Bell's rule ("The zero-frequency problem", 1991): where the context occurred C times with
T different tokens after it, a token that followed it c times gets ``c / (C + T)``, and what was
said before is worth ``T / (C + T)``. So the text is believed more, the longer and the oftener it
repeats itself.

``csrc/drafts/ngram.cpp`` is the same in C++; this one serves where the extension is missing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from paceline.planner.drafts import Drafted
from paceline.proposers.ngram_model.tables import Level, NgramTables, context_key

CACHED_CONTEXT = 4
"""Longest context of the request's own text that is looked up, in tokens."""
MAX_OCCURRENCES = 16
"""Latest occurrences of a context that are counted."""
LONGEST_CONTEXT = 4
"""Tokens before a draft that a look-up may need."""


class TextCache:
    """What followed each context in one request's text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        """Tokens taken in."""
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int], start: int) -> None:
        """Take in the tokens from ``start`` on."""
        for token in token_ids[start:]:
            recent = tuple(self._tokens[-CACHED_CONTEXT:])
            for begin in range(len(recent)):
                self._followers.setdefault(recent[begin:], []).append(token)
            self._tokens.append(token)

    def followers(self, context: tuple[int, ...]) -> list[int]:
        """The tokens after the latest occurrences of a context, latest first."""
        return self._followers.get(context, [])[: -MAX_OCCURRENCES - 1 : -1]


class NgramLookup:
    """Look-ups in a model's tables."""

    def __init__(self, tables: NgramTables) -> None:
        self._is_backoff = tables.is_backoff
        self._levels = tables.levels
        self._unigrams = tables.unigrams.data

    def context_length(self, tail: Sequence[int]) -> int:
        """Tokens of the longest context at the end of a text that the model knows."""
        lengths = range(min(len(tail), len(self._levels)), 0, -1)
        known = (n for n in lengths if _find(self._levels[n - 1], context_key(tail[-n:])) >= 0)
        return next(known, 0)

    def probability(self, tail: Sequence[int], token: int) -> float:
        """Of a token at the end of a text, by the model alone."""
        prob = self._unigram(token)
        for length, level in enumerate(self._levels, start=1):
            at = _find(level, context_key(tail[-length:])) if length <= len(tail) else -1
            if at >= 0:
                value = dict(_continuations(level, at)).get(token, 0.0)
                listed = self._is_backoff and value > 0.0
                prob = value if listed else value + level.lower_weights.item(at) * prob
        return prob

    def draft(
        self,
        cache: TextCache | None,
        tail: Sequence[int],
        max_nodes: int,
        max_depth: int,
        branching: int,
        min_prob: float,
    ) -> Drafted:
        """The nodes whose paths are likeliest, best first; none less likely than ``min_prob``.

        Without a ``cache`` the model speaks alone. ``tail`` is the text's last
        :data:`LONGEST_CONTEXT` tokens, or all of them.
        """
        tokens, parents, probs = list[int](), list[int](), list[float]()
        order = itertools.count()  # decides ties
        heap = [(-1.0, next(order), -1, 1.0, 0, tuple(tail))]
        while heap and len(tokens) < max_nodes:
            minus_prob, _, parent, prob, depth, path = heapq.heappop(heap)
            if depth:
                tokens.append(path[-1])
                parents.append(parent)
                probs.append(prob)
            if depth == max_depth or len(tokens) == max_nodes:
                continue
            for token, prob in self._children(cache, path, branching):
                if -minus_prob * prob < min_prob:
                    break
                below = (*path, token)[-LONGEST_CONTEXT:]
                node = minus_prob * prob, next(order), len(tokens) - 1, prob, depth + 1, below
                heapq.heappush(heap, node)
        return tokens, parents, probs

    def _children(
        self, cache: TextCache | None, tail: tuple[int, ...], most: int
    ) -> list[tuple[int, float]]:
        """The likeliest tokens after a text's end; their probabilities sum to at most 1."""
        probs: dict[int, float] = {}
        rest = 1.0  # a token that is in none of the contexts has so much of its unigram
        for length in range(1, len(tail) + 1):
            context = tail[-length:]
            if length <= len(self._levels):
                rest *= self._hear_model(self._levels[length - 1], context, probs, rest)
            if cache is not None and (followers := cache.followers(context)):
                rest *= self._hear_text(followers, probs, rest)
        best = sorted(probs.items(), key=lambda item: (-item[1], item[0]))[:most]
        total = 0.0
        for _, prob in best:  # from Python 3.12 on sum() rounds otherwise than C++
            total += prob
        return [(token, prob / total) for token, prob in best] if total > 1.0 else best

    def _hear_model(
        self, level: Level, context: tuple[int, ...], probs: dict[int, float], rest: float
    ) -> float:
        """Mix in what the model says of a context; returns what is left to what was before."""
        at = _find(level, context_key(context))
        if at < 0:
            return 1.0
        left = level.lower_weights.item(at)
        for token in probs:
            probs[token] *= left
        for token, value in _continuations(level, at):
            if self._is_backoff:
                probs[token] = value
            else:
                probs[token] = self._lower(probs, rest * left, token) + value
        return left

    def _hear_text(self, followers: list[int], probs: dict[int, float], rest: float) -> float:
        counts: dict[int, int] = {}
        for token in followers:
            counts[token] = counts.get(token, 0) + 1
        total = len(followers) + len(counts)
        left = len(counts) / total
        for token in probs:
            probs[token] *= left
        for token, count in counts.items():
            probs[token] = self._lower(probs, rest * left, token) + count / total
        return left

    def _lower(self, probs: dict[int, float], rest: float, token: int) -> float:
        found = probs.get(token)
        return rest * self._unigram(token) if found is None else found

    def _unigram(self, token: int) -> float:
        return self._unigrams[token] if token < len(self._unigrams) else 0.0


def _find(level: Level, key: int) -> int:
    """Index of the context with this key, -1 where there is none."""
    at = int(np.searchsorted(level.keys, np.uint64(key)))
    return at if at < len(level.keys) and level.keys[at] == key else -1


def _continuations(level: Level, at: int) -> list[tuple[int, float]]:
    begin, end = level.starts[at : at + 2].tolist()
    tokens, values = level.tokens[begin:end].tolist(), level.values[begin:end].tolist()
    return list(zip(tokens, values, strict=True))


class NgramText:
    """Drafts by a model and by a text, as far back as its last ``window`` to twice as many tokens.

    Args:
        window: 0 is the model alone.
        branching: most children of a node.
        min_prob: nodes less likely to be reached and accepted are left out.
    """

    def __init__(self, lookup: NgramLookup, window: int, branching: int, min_prob: float) -> None:
        self._lookup, self._window = lookup, window
        self._branching, self._min_prob = branching, min_prob
        self._base = 0  # where its cache begins
        self._cache = TextCache()

    def draft(self, token_ids: list[int], max_nodes: int, max_depth: int) -> Drafted:
        return self._lookup.draft(
            self._filled_cache(token_ids) if self._window else None,
            token_ids[-LONGEST_CONTEXT:],
            max_nodes,
            max_depth,
            self._branching,
            self._min_prob,
        )

    def _filled_cache(self, token_ids: list[int]) -> TextCache:
        length = len(token_ids)
        if not len(self._cache) or length - self._base > 2 * self._window:
            self._base, self._cache = max(0, length - self._window), TextCache()
        self._cache.extend(token_ids, self._base + len(self._cache))
        return self._cache
