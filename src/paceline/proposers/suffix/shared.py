"""What finished requests have said, by who may be shown it. Knows no drafts.

Texts are partitioned by their requests' ``cache_salt``: nothing of one is ever looked up for
another. An automaton forgets nothing, so the texts of a salt are in two generations: when the newer
one is full, the older one goes as a whole, which costs nothing per token. A text that was of use
is in the newer one again, as a part of the request that it was of use to. Between salts, the least
recently used one gives way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NUM_GENERATIONS = 2


@dataclass(slots=True)
class Generation:
    """Texts of one salt.

    Attributes:
        automaton: a :class:`~paceline.proposers.suffix.automaton.SuffixAutomaton` of them.
        num_texts: how many there are; the automaton knows their tokens.
    """

    automaton: Any
    num_texts: int = 0


class SharedTexts:
    """See the module's docstring.

    Args:
        make: an empty automaton.
        max_texts, max_tokens: most of both over all salts; no texts at all keeps nothing.
    """

    def __init__(self, make: Callable[[], Any], max_texts: int, max_tokens: int) -> None:
        self._make = make
        self._max_texts = max_texts
        self._max_tokens = max_tokens
        self._salts: OrderedDict[str, list[Generation]] = OrderedDict()
        self.num_texts = 0
        self.num_tokens = 0

    def automata(self, salt: str) -> list[Any]:
        """What those of a salt have said, the newest first. They count as used."""
        generations = self._salts.get(salt)
        if generations is None:
            return []
        self._salts.move_to_end(salt)
        return [generation.automaton for generation in generations]

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Keep a text, or the end of one that is longer than a generation."""
        if self._max_texts == 0 or not token_ids:
            return
        most_texts = max(1, self._max_texts // NUM_GENERATIONS)
        most_tokens = max(1, self._max_tokens // NUM_GENERATIONS)
        text = list(token_ids[-most_tokens:])
        generations = self._salts.setdefault(salt, [])
        self._salts.move_to_end(salt)
        if (
            not generations
            or generations[0].num_texts >= most_texts
            or generations[0].automaton.num_tokens + len(text) > most_tokens
        ):
            generations.insert(0, Generation(self._make()))
            self._forget(generations, NUM_GENERATIONS)
        newest = generations[0]
        newest.automaton.end_text()
        newest.automaton.extend(text)
        newest.num_texts += 1
        self.num_texts += 1
        self.num_tokens += len(text)
        self._keep_within_bounds()

    def _keep_within_bounds(self) -> None:
        """Forget the older generation of the salt that was not used for longest."""
        while self.num_texts > self._max_texts or self.num_tokens > self._max_tokens:
            salt, generations = next(iter(self._salts.items()))
            self._forget(generations, len(generations) - 1)
            if not generations:
                del self._salts[salt]

    def _forget(self, generations: list[Generation], keep: int) -> None:
        for generation in generations[keep:]:
            self.num_texts -= generation.num_texts
            self.num_tokens -= generation.automaton.num_tokens
        del generations[keep:]
