"""Drafts by looking the end of the context up in the context itself. Knows no model and no text.

The longest suffix of the tokens that occurred before is continued as it continued then. Every run
of n tokens is, by its hash, a key of one dictionary per n: a step costs a constant number of
dictionary operations per token and per match length; two runs with one hash cost a wrong draft at
worst. Occurrences of one key are linked, latest first: what a few of them have in common is drafted
with more confidence than what one of them says.

The index covers the latest ``prompt_lookup_window`` tokens and is rebuilt once it holds twice as
many, so its memory is bounded by ``2 * window`` entries per match length and request.

``csrc/drafts/prompt_lookup.h`` drafts the same in C++, where the extension is built.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config.speculative import MAX_SPECULATIVE_TOKENS, PromptLookupConfig
from paceline.planner.drafts import Drafted, TextDrafter
from paceline.proposers.base import TargetInfo, TextProposer
from paceline.request.request import Request
from paceline.request.span import ROOT

NAME = "prompt_lookup"
MAX_ALTERNATIVES = 4
"""Occurrences that are compared; enough to tell habit from accident."""

# Priors, from replaying code, edits, prose and stories token by token: how often the continuation
# of a match of so many tokens came true when all of 1, 2, 3, 4 latest occurrences shared it...
_LENGTHS = (1, 2, 3, 4, 5, 8, 16)
_UNANIMOUS = (
    (0.20, 0.37, 0.51, 0.58, 0.67, 0.83, 0.97),
    (0.44, 0.68, 0.77, 0.86, 0.90, 0.93, 0.98),
    (0.60, 0.84, 0.85, 0.94, 0.95, 0.98, 0.99),
    (0.63, 0.86, 0.89, 0.96, 0.97, 0.99, 0.99),
)
# ... and when (this many, the others) of them did, where the length of the match hardly matters.
_DISPUTED = {
    (1, 1): 0.14,
    (1, 2): 0.11,
    (1, 3): 0.08,
    (2, 1): 0.24,
    (2, 2): 0.22,
    (3, 1): 0.70,
}


def _by_length(row: Sequence[float]) -> list[float]:
    """A row of the prior for every match length up to the longest match plus the longest draft."""
    bucket, probs = 0, [row[0]]
    for length in range(1, _LENGTHS[-1] + MAX_SPECULATIVE_TOKENS + 33):
        while bucket + 1 < len(_LENGTHS) and length >= _LENGTHS[bucket + 1]:
            bucket += 1
        probs.append(row[bucket])
    return probs


_PRIOR = [_by_length(row) for row in _UNANIMOUS]


class PromptIndex:
    """Where each run of n tokens, known by its hash, occurred in one text.

    An occurrence is the position of the token that follows it; ``links`` leads from one to the
    occurrence before it, 0 where there is none.

    Args:
        shortest, longest: runs that are known.
        window: how many of the latest tokens count.
    """

    def __init__(self, shortest: int, longest: int, window: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._window = window
        self._base = self._end = 0
        self._levels: list[tuple[int, dict[int, int], list[int]]] = []

    def __len__(self) -> int:
        """Tokens that it covers, at most twice the window."""
        return self._end - self._base

    def extend(self, tokens: list[int]) -> None:
        """Take in what a text that begins as before has got longer by."""
        begin, end = self._end, len(tokens)
        if not self._levels or end - self._base > 2 * self._window:
            begin = self._base = max(0, end - self._window)
            self._levels = [(n, {}, [0] * n) for n in self._lengths]
        base = self._base
        first = max(base, begin - self._lengths[0])
        tail = tuple(tokens[first:])
        for n, latest, links in self._levels:
            for at in range(max(begin, base + n) - first, end - first):
                key = hash(tail[at - n : at])
                links.append(latest.get(key, 0))
                latest[key] = at + first
        self._end = end

    def occurrences(self, tokens: list[int]) -> tuple[int, list[int]]:
        """Length of the longest suffix that occurs in the window, and where, latest first."""
        oldest, tail = len(tokens) - self._window, tuple(tokens[-self._lengths[0] :])
        for n, latest, links in self._levels:
            at = latest.get(hash(tail[-n:]), 0)
            limit = max(0, oldest + n - 1)
            if at <= limit:
                continue
            places = [at]
            while (at := links[at - self._base]) > limit and len(places) < MAX_ALTERNATIVES:
                places.append(at)
            return n, places
        return 0, []


def _full_length(tokens: list[int], at: int, length: int) -> int:
    """The match's length beyond the longest key, as far as the priors tell lengths apart."""
    for longer in (16, 5, 8):  # copying is told by one comparison, an accident by two
        if longer > length:
            if at >= longer and tokens[at - longer : at] == tokens[-longer:]:
                length = longer
            elif longer == 5:
                break
    return length


def _continuation(tokens: list[int], at: int, count: int) -> list[int]:
    """``count`` tokens from ``at`` on; what runs into the end of the context repeats itself."""
    run = tokens[at : at + count]
    while len(run) < count:
        run += run[: count - len(run)]
    return run


class PromptDrafter:
    """Grows drafts from what followed the occurrences of a text's end.

    Args:
        unanimous: how likely a token is that all of some occurrences share, by their number less
            one and the length of the match.
        disputed: how likely one is that some share, by their number and that of the others.
        branching: most children of a node.
        min_prob: nodes less likely to be reached and accepted are left out.
    """

    def __init__(
        self,
        unanimous: Sequence[Sequence[float]],
        disputed: Mapping[tuple[int, int], float],
        branching: int,
        min_prob: float,
    ) -> None:
        self._unanimous, self._disputed = unanimous, disputed
        self._branching, self._min_prob = branching, min_prob

    def draft(
        self, index: PromptIndex, tokens: list[int], max_nodes: int, max_depth: int
    ) -> Drafted:
        """A draft below a text's last token; the index takes in the text first."""
        index.extend(tokens)
        length, places = index.occurrences(tokens)
        if not places:
            return [], [], []
        length = _full_length(tokens, places[0], length)
        runs = [_continuation(tokens, at, max_depth) for at in places]
        if runs.count(runs[0]) < len(runs):
            return self._grow(runs, length, max_nodes)
        probs = self._along(self._unanimous[len(runs) - 1][length:], min(max_depth, max_nodes))
        return runs[0][: len(probs)], list(range(-1, len(probs) - 1)), probs

    def _along(self, priors: Sequence[float], count: int) -> list[float]:
        """Priors along a chain of so many tokens, cut where it is not worth it."""
        path_prob, probs = 1.0, []
        for prob in priors[:count]:
            path_prob *= prob
            if path_prob < self._min_prob:
                break
            probs.append(prob)
        return probs

    def _grow(self, runs: list[list[int]], length: int, max_nodes: int) -> Drafted:
        """Best-first tree over runs that differ; each node goes on with the runs that pass it."""
        tree: Drafted = ([], [], [])
        tokens, parents, probs = tree
        heap: list[tuple[float, int, int, float, int, list[list[int]]]] = []

        def push(parent: int, path_prob: float, depth: int, group: list[list[int]]) -> None:
            for prob, passing in self._children(group, depth, length):
                if path_prob * prob >= self._min_prob:
                    entry = (-path_prob * prob, next(order), parent, prob, depth, passing)
                    heapq.heappush(heap, entry)

        order = iter(range(1 << 30))  # decides ties, so that runs are never compared
        push(ROOT, 1.0, 0, runs)
        while heap and len(tokens) < max_nodes:
            minus_prob, _, parent, prob, depth, passing = heapq.heappop(heap)
            tokens.append(passing[0][depth])
            parents.append(parent)
            probs.append(prob)
            if depth + 1 < len(passing[0]):
                push(len(tokens) - 1, -minus_prob, depth + 1, passing)
        return tree

    def _children(
        self, group: list[list[int]], depth: int, length: int
    ) -> list[tuple[float, list[list[int]]]]:
        """The likeliest next tokens of a group, each with its prior and the runs that take it."""
        groups: dict[int, list[list[int]]] = {}
        for run in group:
            groups.setdefault(run[depth], []).append(run)
        total = len(group)
        if len(groups) == 1:
            return [(self._unanimous[total - 1][length + depth], group)]
        # The sort is stable: among equals the latest occurrence goes first.
        ranked = sorted(groups.values(), key=len, reverse=True)[: self._branching]
        return [(self._disputed[len(runs), total - len(runs)], runs) for runs in ranked]


class PromptText:
    """Drafts from a text itself.

    Args:
        shortest, longest: runs that are looked up, in tokens.
        window: how many of the latest tokens count.
    """

    def __init__(self, drafter: PromptDrafter, shortest: int, longest: int, window: int) -> None:
        self._drafter, self._index = drafter, PromptIndex(shortest, longest, window)

    def draft(self, token_ids: list[int], max_nodes: int, max_depth: int) -> Drafted:
        return self._drafter.draft(self._index, token_ids, max_nodes, max_depth)


class PromptLookupProposer(TextProposer):
    """See the module's docstring. A request's own ``token_ids`` is the context.

    Args:
        is_native: take the native index; None is where it was built.
    """

    name = NAME
    config: PromptLookupConfig

    def __init__(self, config: PromptLookupConfig, is_native: bool | None = None) -> None:
        super().__init__(config, is_native)
        native = self._native
        self._make_text: Any = native.PromptText if native else PromptText
        self._drafter: Any = (native.PromptDrafter if native else PromptDrafter)(
            _PRIOR,
            _DISPUTED,
            self._branching,
            config.min_accept_prob,
        )

    def _open(self, request: Request) -> TextDrafter:
        config = self.config
        text: TextDrafter = self._make_text(
            self._drafter,
            config.prompt_lookup_min,
            config.prompt_lookup_max,
            config.prompt_lookup_window,
        )
        return text


def build(config: PromptLookupConfig, target: TargetInfo) -> PromptLookupProposer:
    return PromptLookupProposer(config)
