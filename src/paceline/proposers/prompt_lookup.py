"""Drafts by looking the end of the context up in the context itself. Knows no model and no text.

The longest suffix of the tokens that occurred before is continued as it continued then. Every run
of n tokens is, by its hash, a key of one dictionary per n: a step costs a constant number of
dictionary operations per token and per match length; two runs with one hash cost a wrong draft at
worst. Occurrences of one key are linked, latest first: what a few of them have in common is drafted
with more confidence than what one of them says.

The index covers the latest ``prompt_lookup_window`` tokens and is rebuilt once it holds twice as
many, so its memory is bounded by ``2 * window`` entries per match length and request.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from paceline.config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from paceline.proposers.base import DraftBudget, TargetInfo
from paceline.request import Request, VerifyResult
from paceline.span import ROOT, DraftTree

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
_CHAIN_PARENTS = list(range(-1, MAX_SPECULATIVE_TOKENS - 1))


class _Index:
    """Where each run of n tokens, known by its hash, occurred in one request.

    An occurrence is the position of the token that follows it; ``links`` leads from one to the
    occurrence before it, 0 where there is none.
    """

    __slots__ = ("base", "indexed", "levels")

    def __init__(self, lengths: Sequence[int], base: int) -> None:
        self.base = base
        self.indexed = base
        self.levels: list[tuple[int, dict[int, int], list[int]]] = [
            (n, {}, [0] * n) for n in lengths
        ]

    def extend(self, tokens: list[int]) -> None:
        begin, end = self.indexed, len(tokens)
        base = self.base
        first = max(base, begin - self.levels[0][0])
        tail = tuple(tokens[first:])
        for n, latest, links in self.levels:
            for at in range(max(begin, base + n) - first, end - first):
                key = hash(tail[at - n : at])
                links.append(latest.get(key, 0))
                latest[key] = at + first
        self.indexed = end

    def occurrences(self, tokens: list[int], oldest: int) -> tuple[int, list[int]]:
        """Length of the longest suffix that occurs from ``oldest`` on, and where, latest first."""
        tail = tuple(tokens[-self.levels[0][0] :])
        for n, latest, links in self.levels:
            at = latest.get(hash(tail[-n:]), 0)
            limit = max(0, oldest + n - 1)
            if at <= limit:
                continue
            found = [at]
            while (at := links[at - self.base]) > limit and len(found) < MAX_ALTERNATIVES:
                found.append(at)
            return n, found
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


class PromptLookupProposer:
    """See the module's docstring. A request's own ``token_ids`` is the context."""

    costs_forwards = False
    name = NAME

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self._longest_first = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._window = config.prompt_lookup_window
        self._max_depth = config.num_speculative_tokens
        self._max_nodes = config.tree_nodes
        self._branching = config.max_branching if config.max_tree_nodes else 1
        self._min_prob = config.min_accept_prob
        self._indices: dict[int, _Index] = {}
        self._chains: dict[tuple[int, int], list[float]] = {}

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        trees = []
        for request, nodes, depth in zip(requests, budget.max_nodes, budget.max_depth, strict=True):
            depth = min(depth, self._max_depth)
            nodes = min(nodes, self._max_nodes)
            trees.append(self._draft(request, nodes, depth) if nodes and depth else DraftTree())
        return trees

    def observe(self, request: Request, result: VerifyResult) -> None:
        if request.request_id in self._indices:  # else it was never asked for this request
            self._index_of(request)

    def finish(self, request: Request) -> None:
        self._indices.pop(request.request_id, None)

    def context_length(self, request: Request) -> int:
        return len(request.token_ids)

    def _index_of(self, request: Request) -> _Index:
        tokens = request.token_ids
        end = len(tokens)
        index = self._indices.get(request.request_id)
        if index is None or end - index.base > 2 * self._window:
            index = _Index(self._longest_first, max(0, end - self._window))
            self._indices[request.request_id] = index
        if index.indexed < end:
            index.extend(tokens)
        return index

    def _draft(self, request: Request, max_nodes: int, depth: int) -> DraftTree:
        tokens = request.token_ids
        index = self._index_of(request)
        length, found = index.occurrences(tokens, len(tokens) - self._window)
        if not found:
            return DraftTree()
        length = _full_length(tokens, found[0], length)
        runs = [_continuation(tokens, at, depth) for at in found]
        run = runs[0]
        if len(runs) > 1 and runs.count(run) < len(runs):
            return self._grow(runs, length, max_nodes)
        probs = self._chain_probs(len(runs), length)[: min(depth, max_nodes)]
        count = len(probs)
        return DraftTree(run[:count], _CHAIN_PARENTS[:count], probs, [NAME] * count)

    def _chain_probs(self, support: int, length: int) -> list[float]:
        """Priors along a run that ``support`` occurrences share, cut where it is not worth it."""
        probs = self._chains.get((support, length))
        if probs is None:
            path_prob = 1.0
            probs = []
            for prob in _PRIOR[support - 1][length : length + self._max_depth]:
                path_prob *= prob
                if path_prob < self._min_prob:
                    break
                probs.append(prob)
            self._chains[support, length] = probs
        return probs

    def _grow(self, runs: list[list[int]], length: int, max_nodes: int) -> DraftTree:
        """Best-first tree over runs that differ; each node goes on with the runs that pass it."""
        tree = DraftTree()
        heap: list[tuple[float, int, int, float, int, list[list[int]]]] = []

        def push(parent: int, path_prob: float, depth: int, group: list[list[int]]) -> None:
            for prob, passing in self._children(group, depth, length):
                if path_prob * prob >= self._min_prob:
                    entry = (-path_prob * prob, next(order), parent, prob, depth, passing)
                    heapq.heappush(heap, entry)

        order = iter(range(1 << 30))  # decides ties, so that runs are never compared
        push(ROOT, 1.0, 0, runs)
        while heap and len(tree) < max_nodes:
            minus_prob, _, parent, prob, depth, passing = heapq.heappop(heap)
            tree.token_ids.append(passing[0][depth])
            tree.parents.append(parent)
            tree.accept_probs.append(prob)
            tree.origins.append(NAME)
            if depth + 1 < len(passing[0]):
                push(len(tree) - 1, -minus_prob, depth + 1, passing)
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
            return [(_PRIOR[total - 1][length + depth], group)]
        # The sort is stable: among equals the latest occurrence goes first.
        ranked = sorted(groups.values(), key=len, reverse=True)[: self._branching]
        return [(_DISPUTED[len(runs), total - len(runs)], runs) for runs in ranked]


def build(config: SpeculativeConfig, target: TargetInfo) -> PromptLookupProposer:
    return PromptLookupProposer(config)
