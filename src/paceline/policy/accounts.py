"""Accounts of what asking proposers for drafts brought, and the time that probes may take.

An account holds what asking a proposer brings, the tokens that its chosen nodes promised less the
time of verifying them, and the time that planning and drafting take. The gain is the former less
the latter at the going rate, which depends on how many requests decode. It is one for all
requests. A proposer has accounts apart for situations: one at whose drafts one can glance for how
much it would draft, others for how much was drafted before them, because what they add depends on
that. Who is in the red is not asked, but probed: probes are paid from an allowance, so that they
never take more than a fixed share of the time. Knows no requests and no trees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.policy.allowance import Allowance

PROBE_SHARE = 0.002
"""Share of the time that probes of one proposer may take."""
START = 0.5
"""Gain that is expected of a proposer that was never asked: enough to be asked some times."""
PACE = 0.1
"""Weight of the latest draft in an account."""
EXPECTED_TOKENS = (0.25, 0.75, 1.5)
"""Between these lie the situations that are told apart, by what is drafted."""

Key = tuple[str, int]


def situation(expected_tokens: float) -> int:
    """How much is drafted, as a number from 0 for little or nothing."""
    return bisect_right(EXPECTED_TOKENS, expected_tokens)


@dataclass(slots=True)
class _Account:
    """What asking a proposer brings and takes.

    Attributes:
        tokens: that its drafts promise beyond the time in which they are verified.
        ms: that planning and drafting take.
        count: drafts that these rest on.
        probed: when each request was last probed, in probes so far.
    """

    tokens: float = START
    ms: float = 0.0
    count: int = 0
    probed: dict[int, int] = field(default_factory=dict)

    def settle(self, tokens: float, ms: float) -> None:
        self.count += 1
        pace = max(PACE, 1 / (self.count + 2))
        self.ms += pace * (ms - self.ms)
        # No less than nothing, so that a change of text is believed after few probes.
        self.tokens = max(0.0, self.tokens + pace * (tokens - self.tokens))


class Accounts:
    """Accounts of all proposers.

    Attributes:
        probing: time that probes may take, by proposer: cheap ones would leave nothing for others.
    """

    def __init__(self) -> None:
        self._accounts: defaultdict[Key, _Account] = defaultdict(_Account)
        self.probing: defaultdict[str, Allowance] = defaultdict(lambda: Allowance(PROBE_SHARE))
        self._probes = 0

    def open(self, key: Key, promised: float, ms: float) -> None:
        """Expect so much of a proposer that was never asked, half a token at most."""
        if key not in self._accounts:
            self._accounts[key] = _Account(min(START, promised), ms)

    def gain(self, key: Key, rate: float) -> float:
        """What asking this proposer for a request is expected to bring, in tokens.

        Args:
            rate: tokens that a millisecond is worth.
        """
        account = self._accounts[key]
        return account.tokens - rate * account.ms

    def by_waiting(self, key: Key, request_ids: Iterable[int]) -> list[int]:
        """These requests, first those that waited longest for a probe."""
        probed = self._accounts[key].probed
        return sorted(request_ids, key=lambda request_id: probed.get(request_id, -1))

    def probe(self, key: Key, request_id: int, cost_ms: float) -> None:
        """Pay for a probe."""
        self.probing[key[0]].spend(cost_ms)
        self._probes += 1
        self._accounts[key].probed[request_id] = self._probes

    def settle(self, key: Key, tokens: float, ms: float) -> None:
        """Book what asking a proposer for a request brought, and what it took."""
        self._accounts[key].settle(tokens, ms)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        for account in self._accounts.values():
            account.probed.pop(request_id, None)
