"""A suffix automaton that counts what followed, and where a text is in it. Knows no drafts.

One state per set of strings that end at the same places of the texts; a text is added token by
token at amortised constant cost (Blumer et al., "The smallest automaton recognizing the subwords of
a text", 1985; for several texts the last state goes back to the root). An edge knows how often its
token followed its state's strings. These counts are exact for strings of at most ``max_depth``
tokens: each token is counted along the suffix links of the longest such suffix.

``csrc/drafts/suffix.cpp`` is the same in C++; this one serves where the extension is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

EMPTY, NONE = 0, -1

Edges = dict[int, list[int]]
"""By token: target state and count, what came last at the end."""
Place = tuple[int, int]
"""A state, and the length of the suffix that was matched there."""


class SuffixAutomaton:
    """See the module's docstring."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.num_tokens = 0
        """Tokens of all texts."""
        self._lengths = [0]
        self._links = [NONE]
        self._counts = [0]
        self._edges: list[Edges] = [{}]
        self.end_text()

    @property
    def num_states(self) -> int:
        """At most twice the tokens, and one."""
        return len(self._lengths)

    @property
    def end(self) -> Place:
        """Where the longest suffix of the text occurs, within ``max_depth``."""
        return self._active, self._active_length

    def end_text(self) -> None:
        """Let the next token begin another text."""
        self._last = EMPTY
        self._active, self._active_length = EMPTY, 0

    def extend(self, token_ids: Sequence[int], start: int = 0) -> None:
        """Add the tokens from ``start`` on to the text."""
        for at in range(start, len(token_ids)):
            self._append(token_ids[at])

    def match(self, token_ids: Sequence[int]) -> Place:
        """Where the longest suffix of the tokens, within ``max_depth``, occurs."""
        place = EMPTY, 0
        for token in token_ids[-self.max_depth :]:
            place = self.follow(place, token)
        return place

    def follow(self, place: Place, token: int) -> Place:
        """Where the longest suffix of what is matched and a further token occurs."""
        state, length = place
        while token not in self._edges[state]:
            if state == EMPTY:
                return EMPTY, 0
            state = self._links[state]
            length = self._lengths[state]
        return self._within_depth(self._edges[state][token][0], length + 1)

    def contexts(self, place: Place) -> Iterator[tuple[int, int, Edges]]:
        """Of a matched suffix and its own suffixes: length, continuations, and which they were."""
        state, length = place
        while state != EMPTY:
            if self._counts[state]:
                yield length, self._counts[state], self._edges[state]
            state = self._links[state]
            length = self._lengths[state]

    def _within_depth(self, state: int, length: int) -> Place:
        if length > self.max_depth:
            length = self.max_depth
            if self._lengths[self._links[state]] >= length:
                state = self._links[state]
        return state, length

    def _append(self, token: int) -> None:
        self.num_tokens += 1
        if token in self._edges[self._last]:  # as an earlier text went on
            self._last = self._split(self._last, token)
        else:
            new, state = len(self._lengths), self._last
            self._add_state(self._lengths[state] + 1, NONE, 0, {})
            while state != NONE and token not in self._edges[state]:
                self._edges[state][token] = [new, 0]
                state = self._links[state]
            self._links[new] = EMPTY if state == NONE else self._split(state, token)
            self._last = new
        self._count(token)

    def _split(self, state: int, token: int) -> int:
        """The state of a state's longest string with the token after it, and of no longer ones."""
        target, length = self._edges[state][token][0], self._lengths[state] + 1
        if self._lengths[target] == length:
            return target
        copied = {each: list(edge) for each, edge in self._edges[target].items()}
        short = self._add_state(length, self._links[target], self._counts[target], copied)
        self._links[target] = short
        while state != NONE and self._edges[state].get(token, (NONE,))[0] == target:
            self._edges[state][token][0] = short
            state = self._links[state]
        if self._active == target and self._active_length <= length:
            self._active = short
        return short

    def _add_state(self, length: int, link: int, count: int, edges: Edges) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._counts.append(count)
        self._edges.append(edges)
        return len(self._lengths) - 1

    def _count(self, token: int) -> None:
        """Count the token after every suffix of the text before it, within the depth."""
        state = self._active
        while state != NONE:
            self._counts[state] += 1
            edges = self._edges[state]
            edge = edges.pop(token)
            edge[1] += 1
            edges[token] = edge
            state = self._links[state]
        target = self._edges[self._active][token][0]
        self._active, self._active_length = self._within_depth(target, self._active_length + 1)


class SuffixCursor:
    """Where the longest suffix of a growing text occurs, followed token by token.

    Args:
        is_own: the automaton is of the very text that is followed, and holds all of it.
    """

    def __init__(self, automaton: SuffixAutomaton, is_own: bool = False) -> None:
        self.automaton = automaton
        self._is_own = is_own
        self._place: Place = EMPTY, 0
        self._num_read = 0
        self._num_known = 0
        """Tokens of the automaton when the place was found."""

    def advance(self, token_ids: Sequence[int]) -> Place:
        """The place in the whole text; begins again where the automaton has grown meanwhile."""
        automaton = self.automaton
        if self._is_own:
            return automaton.end
        num_unread = len(token_ids) - self._num_read
        is_stale = automaton.num_tokens != self._num_known or num_unread < 0
        if is_stale or num_unread > automaton.max_depth:
            self._place = automaton.match(token_ids)
        else:
            for token in token_ids[self._num_read :]:
                self._place = automaton.follow(self._place, token)
        self._num_read, self._num_known = len(token_ids), automaton.num_tokens
        return self._place
