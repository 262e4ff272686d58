"""What asking proposers for drafts is worth, learnt from what their drafts promised and took.

A value is the tokens that a proposer's chosen nodes promised beyond the time of verifying them,
less the time of drafting at the going rate, which depends on how many requests decode. All requests
of an adapter share it, or all of none: what one of them shows, the others need not find out. A
proposer has a value for each situation. That is how long a match it has in the request's text,
where it knows that before it drafts, and else how much other proposers have drafted in the step
already.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

SITUATIONS = (0.25, 0.75, 1.5)
"""Expected tokens of the drafts that are there already; between these situations are told apart."""
MATCHES = (2, 3, 5, 12)
"""Lengths of matches in tokens, from which on situations are told apart."""
FIRST_VALUE = 0.5
"""Tokens that are expected of a proposer that was never asked: enough to be asked some times."""
PACE = 0.1
"""Weight of the latest draft in a value."""


@dataclass(slots=True)
class ProposerValue:
    """What one draft for one request brings and takes.

    Attributes:
        tokens: that the chosen nodes promise beyond the time in which they are verified.
        ms: that planning and drafting take.
        count: drafts that these rest on.
    """

    tokens: float = FIRST_VALUE
    ms: float = 0.0
    count: int = 0

    def gain(self, rate: float) -> float:
        """Tokens that asking is expected to bring, where a millisecond is worth ``rate`` tokens."""
        return self.tokens - rate * self.ms

    def learn(self, tokens: float, ms: float, drafts: int = 1) -> None:
        """Take in what some drafts promised and took on average."""
        self.count += drafts
        pace = max(1.0 - (1.0 - PACE) ** drafts, drafts / (self.count + 2))
        self.ms += pace * (ms - self.ms)
        # No less than nothing, so that a change of text is believed after few drafts.
        self.tokens = max(0.0, self.tokens + pace * (tokens - self.tokens))


class ProposerValues:
    """The values of all proposers."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int, str | None], ProposerValue] = {}

    def of(self, name: str, situation: int = 0, adapter: str | None = None) -> ProposerValue:
        """A proposer's value for requests of an adapter, or of none, whose value that of an adapter
        is at first; a few drafts of its own outweigh it."""
        key = name, situation, adapter
        value = self._values.get(key)
        if value is None:
            known = ProposerValue() if adapter is None else self.of(name, situation)
            value = self._values[key] = replace(known, count=0)
        return value


def drafted_situation(expected_tokens: float) -> int:
    """Where others expect so many tokens of their drafts for the request."""
    return bisect_right(SITUATIONS, expected_tokens)


def matched_situation(num_tokens: int) -> int:
    """Where so many tokens at the text's end occurred before."""
    return bisect_right(MATCHES, num_tokens)
