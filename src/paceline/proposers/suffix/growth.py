"""Grows a draft tree from what suffix automata have counted. Knows no requests.

How likely a token is after a context is blended from the context's suffixes, the longest first, as
in prediction by partial matching (Cleary and Witten, 1984): of a suffix that was continued ``n``
times, a token that came ``c`` times gets ``c / (n + b)`` of what is left, and ``b / (n + b)`` is
left to the shorter ones. The tree is the likeliest nodes, best first.

``csrc/drafts/suffix.cpp`` is the same in C++, to the last bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count, islice

from paceline.planner.drafts import Drafted
from paceline.proposers.suffix.automaton import Edges, Place, SuffixAutomaton, SuffixCursor
from paceline.request.span import ROOT

MAX_CONTEXTS = 4
"""Suffixes that are blended."""
MAX_EDGES = 16
"""Continuations of one suffix that are looked at, the latest first; it bounds a step's time."""
LEAST_REST = 0.05
"""What is left to shorter suffixes and not worth looking for."""
USUAL_DEPTH = 8
"""Depth that every draft may have; a longer match allows more."""

# The b of contexts of so many tokens, those that were continued in several ways and those that
# were always continued alike. Greedy answers are likeliest with about half of these, sampled ones
# with about twice as much: code, chat, edits, prose and JSON by the embedded target.
_LENGTHS = (1, 2, 3, 5, 12, 16, 24)
_OTHERS = (
    (8.0, 2.5),
    (4.0, 1.4),
    (2.5, 0.6),
    (1.7, 0.45),
    (0.9, 0.2),
    (0.5, 0.1),
    (0.2, 0.05),
)

_Entry = tuple[float, int, int, int, float, int, list[Place]]
"""Minus the path probability, order, parent, token, probability, depth, the parent's places."""


def others_by_length(max_depth: int) -> list[tuple[float, float]]:
    """How much speaks against a context's own counts, by its length: (disputed, unanimous)."""
    places = (sum(length >= least for least in _LENGTHS) for length in range(max_depth + 1))
    return [_OTHERS[max(0, place - 1)] for place in places]


class SuffixRules:
    """See the module's docstring.

    Args:
        others: by the length of a context, up to the automata's depth.
        branching: most children of a node.
        min_token_prob: least share of a context's continuations that a token must have.
        min_path_prob: nodes less likely to be reached and accepted are left out.
        max_spec_factor: longest draft, as a multiple of the longest match.
    """

    def __init__(
        self,
        others: Sequence[tuple[float, float]],
        *,
        branching: int,
        min_token_prob: float,
        min_path_prob: float,
        max_spec_factor: float,
    ) -> None:
        self._others = others
        self._branching = branching
        self._min_token_prob = min_token_prob
        self._min_path_prob = min_path_prob
        self._max_spec_factor = max_spec_factor

    def draft(
        self,
        cursors: Sequence[SuffixCursor],
        token_ids: Sequence[int],
        max_nodes: int,
        max_depth: int,
    ) -> Drafted:
        """The likeliest continuations of the tokens; of equally long matches the first counts.

        Args:
            cursors: of this text, and never of another one.
        """
        automata = [cursor.automaton for cursor in cursors]
        places = [cursor.advance(token_ids) for cursor in cursors]
        longest = max((length for length, _, _ in _contexts(automata, places)), default=0)
        most = self._max_spec_factor * longest
        if most < max_depth:
            max_depth = min(max_depth, max(USUAL_DEPTH, int(most)))
        tree: Drafted = ([], [], [])
        tokens, parents, probs = tree
        heap: list[_Entry] = []
        order = count()

        def push(parent: int, path_prob: float, depth: int, places: list[Place]) -> None:
            for token, prob in self._children(automata, places):
                if path_prob * prob < self._min_path_prob:
                    break
                entry = (-path_prob * prob, next(order), parent, token, prob, depth, places)
                heapq.heappush(heap, entry)

        if max_depth > 0:
            push(ROOT, 1.0, 1, places)
        while heap and len(tokens) < max_nodes:
            minus_prob, _, parent, token, prob, depth, places = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            probs.append(prob)
            if depth < max_depth:
                below = [a.follow(p, token) for a, p in zip(automata, places, strict=True)]
                push(len(tokens) - 1, -minus_prob, depth + 1, below)
        return tree

    def _children(
        self, automata: Sequence[SuffixAutomaton], places: Sequence[Place]
    ) -> list[tuple[int, float]]:
        """The likeliest next tokens, the likeliest first; of equals, the longest context's."""
        probs: dict[int, float] = {}
        rest = 1.0
        for length, total, edges in list(_contexts(automata, places))[:MAX_CONTEXTS]:
            recent = [(token, edges[token][1]) for token in islice(reversed(edges), MAX_EDGES)]
            other = self._others[length][recent[0][1] == total]
            share, least = rest / (total + other), self._min_token_prob * total
            unseen = total
            for token, times in recent:
                if times >= least:
                    probs[token] = probs.get(token, 0.0) + share * times
                unseen -= times
                if unseen < least:  # nothing of what is left can be enough
                    break
            rest *= other / (total + other)
            if rest < LEAST_REST:
                break
        ranked = sorted(probs.items(), key=lambda item: -item[1])
        return ranked[: self._branching]


class SuffixText:
    """Drafts from a text itself and from others that are shared with it."""

    def __init__(self, drafter: SuffixRules, max_depth: int) -> None:
        self._drafter = drafter
        self._own = SuffixAutomaton(max_depth)
        self._cursors = [SuffixCursor(self._own, is_own=True)]

    def share(self, automata: Sequence[SuffixAutomaton]) -> None:
        """Match these too, in place of those that were shared before."""
        self._cursors[1:] = map(SuffixCursor, automata)

    def matched(self, token_ids: list[int]) -> int:
        """Tokens at the text's end that occurred before and went on."""
        self._own.extend(token_ids, self._own.num_tokens)
        automata = [cursor.automaton for cursor in self._cursors]
        places = [cursor.advance(token_ids) for cursor in self._cursors]
        return max((length for length, _, _ in _contexts(automata, places)), default=0)

    def draft(self, token_ids: list[int], max_nodes: int, max_depth: int) -> Drafted:
        self._own.extend(token_ids, self._own.num_tokens)
        return self._drafter.draft(self._cursors, token_ids, max_nodes, max_depth)


def _contexts(
    automata: Sequence[SuffixAutomaton], places: Sequence[Place]
) -> list[tuple[int, int, Edges]]:
    """The longest suffixes at some places that were continued, the longest first."""
    found = [
        context
        for automaton, place in zip(automata, places, strict=True)
        for context in automaton.contexts(place)
    ]
    return sorted(found, key=lambda context: -context[0])
