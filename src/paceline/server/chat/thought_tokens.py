"""How many tokens of an answer are thoughts, as its usage tells. Knows no protocol."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from paceline.server.chat.parts import Places
from paceline.server.chat.token_places import Placed


class ThoughtPlaces(NamedTuple):
    """Where thoughts stand in an answer, as far as that is certain; places only grow at their end.

    White space around thoughts, which is not told, is part of them.

    Attributes:
        inside: between the marks.
        marked: with the marks.
    """

    inside: Places = ()
    marked: Places = ()


class ThoughtCount(NamedTuple):
    """Tokens of thoughts: without those that only spell marks, and with them."""

    inside: int = 0
    marked: int = 0


class ThoughtTokens:
    """Counts the tokens of one sample whose text lies in its thoughts, in whole or in part.

    vLLM counts those between the marks (``count_reasoning_tokens`` in ``vllm/reasoning``, commit
    5d9dca91) and Anthropic those of the marks as well (``OutputTokensDetails`` of its package
    2.14).
    """

    def __init__(self) -> None:
        self._inside, self._marked = _Counter(), _Counter()

    def take(self, placed: Iterable[Placed], places: ThoughtPlaces) -> ThoughtCount:
        """What a piece adds.

        Args:
            placed: its tokens.
            places: of the thoughts in the answer up to this piece.
        """
        for start, end, _ in placed:
            self._inside.tokens.append((start, end))
            self._marked.tokens.append((start, end))
        return ThoughtCount(self._inside.count(places.inside), self._marked.count(places.marked))


class _Counter:
    """Counts the tokens at places that grow."""

    def __init__(self) -> None:
        self.tokens = deque[tuple[int, int]]()  # not counted, and not before the places' end
        self._places: Places = ()

    def count(self, places: Places) -> int:
        """The tokens at these places that have not been counted; what is before them is dropped."""
        if places == self._places:
            return 0
        self._places, count, last = places, 0, places[-1][1]
        undecided = list[tuple[int, int]]()
        while self.tokens and self.tokens[0][0] < last:
            start, end = self.tokens.popleft()
            if any(start < stop and begin < end for begin, stop in places):
                count += 1
            elif end > last:
                undecided.append((start, end))
        self.tokens.extendleft(reversed(undecided))
        return count
