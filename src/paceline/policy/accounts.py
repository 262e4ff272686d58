"""Accounts of what asking proposers for drafts brought, and the time that probes may take.

An account holds the expected net gain of asking a proposer, in tokens: what its chosen nodes
promised, less the time of verifying and of drafting them at the going rate. There is one account
per request, and one over all requests from which a new request starts; a proposer that costs
forwards has them apart for how much others have drafted already, because what it adds depends on
that. Who is in the red is not asked, but probed: probes are paid from a budget that grows with
time, so that they never take more than a fixed share of it. Knows no requests and no trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PROBE_SHARE = 0.004
"""Share of the time that probes may take."""
SAVED_PROBES = 4
"""Probes that can be saved up for a time when they are needed."""
FLOOR = -0.1
"""An account sinks no deeper, so that a change of text is believed after few probes."""
START = 0.5
"""Gain that is expected of a proposer that was never asked: enough to be asked some times."""
OWN_PACE, SHARED_PACE = 0.2, 0.05
"""Weight of the latest gain in a request's account and in the one over all requests."""
EXPECTED_TOKENS = (0.25, 0.75, 1.5)
"""Between these lie the situations that are told apart, by what others have drafted."""

Key = tuple[str, int]


def situation(expected_tokens: float) -> int:
    """How much others have drafted, as a number from 0 for nothing."""
    return sum(expected_tokens >= limit for limit in EXPECTED_TOKENS)


@dataclass(slots=True)
class _Account:
    gain: float = START
    count: int = 0

    def add(self, gain: float, pace: float) -> None:
        self.count += 1
        self.gain = max(FLOOR, self.gain + max(pace, 1 / (self.count + 2)) * (gain - self.gain))


@dataclass(slots=True)
class _Requests:
    """Accounts of single requests, and when each was last probed (in probes so far)."""

    gains: dict[int, float] = field(default_factory=dict)
    probed: dict[int, int] = field(default_factory=dict)


class Accounts:
    """Accounts of all proposers."""

    def __init__(self) -> None:
        self._shared: dict[Key, _Account] = {}
        self._own: dict[Key, _Requests] = {}
        self._budget_ms = 0.0
        self._probe_ms = 0.0
        self._probes = 0

    def gain(self, key: Key, request_id: int) -> float:
        """What asking this proposer for this request is expected to bring."""
        own = self._own.get(key)
        gain = own.gains.get(request_id) if own else None
        if gain is None:
            account = self._shared.get(key)
            gain = account.gain if account else START
        return gain

    def has_gain(self, key: Key, request_ids: Sequence[int]) -> bool:
        """Whether asking is expected to pay for any of these requests."""
        account, own = self._shared.get(key), self._own.get(key)
        shared = account.gain if account else START
        if own is None:
            return shared > 0.0
        gains = own.gains
        return any(gains.get(request_id, shared) > 0.0 for request_id in request_ids)

    def may_probe(self, cost_ms: float) -> bool:
        """Whether there is time for a probe of this cost."""
        if cost_ms > self._probe_ms:
            self._probe_ms = cost_ms
        return self._budget_ms >= cost_ms

    def milliseconds_until(self, cost_ms: float) -> float:
        """Time that has to pass before there is time for a probe of this cost."""
        return (cost_ms - self._budget_ms) / PROBE_SHARE

    def by_waiting(self, key: Key, request_ids: Sequence[int]) -> list[int]:
        """These requests, first those that waited longest for a probe."""
        own = self._own.get(key)
        return sorted(request_ids, key=lambda i: own.probed.get(i, -1) if own else -1)

    def probe(self, key: Key, request_id: int, cost_ms: float) -> None:
        """Pay for a probe."""
        self._budget_ms -= cost_ms
        self._probes += 1
        self._own.setdefault(key, _Requests()).probed[request_id] = self._probes

    def settle(self, key: Key, request_id: int | None, gain: float) -> None:
        """Book what asking a proposer brought, in tokens.

        Args:
            request_id: for whom it was asked; None for a request that has ended since.
        """
        shared = self._shared.setdefault(key, _Account())
        if request_id is not None:
            gains = self._own.setdefault(key, _Requests()).gains
            before = gains.get(request_id, shared.gain)
            gains[request_id] = max(FLOOR, before + OWN_PACE * (gain - before))
        shared.add(gain, SHARED_PACE)

    def passed(self, milliseconds: float) -> None:
        """Let time pass, a share of which probes may take."""
        share = PROBE_SHARE * milliseconds
        most = SAVED_PROBES * (self._probe_ms if self._probe_ms > share else share)
        saved = self._budget_ms + share
        self._budget_ms = saved if saved < most else most

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        for own in self._own.values():
            own.gains.pop(request_id, None)
            own.probed.pop(request_id, None)
