"""Who is asked for drafts, decided before drafting is paid for. Knows no trees and no forwards.

A proposer is asked for a request whose account says that it pays; where it does not, one request at
a time is probed when there is time for it. A draft model that has to read a prompt first is asked
if that comes back before the request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.policy.accounts import EXPECTED_TOKENS, Accounts, Key, situation
from paceline.policy.drafting_cost import USUAL_LAG, DraftingCost
from paceline.policy.planner import Drafts, Source, expected_tokens
from paceline.request import Request

HOST_PACE = 0.05
"""Weight of the latest step in the time that planning takes."""


@dataclass(slots=True)
class Ask:
    """One proposer's draft for one request in a step.

    Attributes:
        key: the account that it goes by.
        index: the request's place in the step.
        lag: tokens that the proposer has to catch up with, where they are more than usual.
        cost_ms: time of drafting.
        gain: what the chosen nodes promise beyond the time in which they are verified, in tokens.
    """

    key: Key
    index: int
    request: Request
    lag: int = 0
    cost_ms: float = 0.0
    gain: float = 0.0


class Asking:
    """See the module's docstring.

    Args:
        drafting: what drafting costs.
    """

    def __init__(self, drafting: DraftingCost) -> None:
        self._drafting = drafting
        self._accounts = Accounts()
        self._keys: dict[str, list[Key]] = {}
        self._lengths: dict[tuple[str, int], int] = {}
        self._host_ms = 0.0

    def is_anyone_worth_asking(self, requests: Sequence[Request]) -> bool:
        """Whether any proposer that is known is to be asked for any of the requests."""
        accounts = self._accounts
        for name, keys in self._keys.items():
            for request in requests:
                if request.params.speculative.enabled and any(
                    accounts.gain(key, request.request_id) > 0.0 for key in keys
                ):
                    return True
            if accounts.may_probe(self._probe_ms(name)):
                return True
        return not self._keys

    def ask(
        self,
        source: Source,
        requests: Sequence[Request],
        candidates: Sequence[int],
        drafts: Drafts,
        rate: float,
    ) -> list[Ask]:
        """For which of the candidates a proposer drafts.

        Args:
            requests: of the step; ``candidates`` and ``drafts`` as in
                :meth:`~paceline.policy.planner.Planner.ask`.
            rate: tokens that a millisecond is worth.
        """
        if source.name not in self._keys:
            situations = range(len(EXPECTED_TOKENS) + 1) if source.costs_forwards else [0]
            self._keys[source.name] = [(source.name, each) for each in situations]
        asks: list[Ask] = []
        closed: dict[Key, list[Ask]] = {}
        for i in candidates:
            found = situation(expected_tokens(drafts[i])) if source.costs_forwards else 0
            asked = Ask((source.name, found), i, requests[i], self._lag(source, requests[i]))
            if self._is_worth(asked, rate):
                asks.append(asked)
            else:
                closed.setdefault(asked.key, []).append(asked)
        if closed:
            asks += self._probe(closed[min(closed)])  # where others have drafted least
        for asked in asks:
            request = asked.request
            self._lengths[source.name, request.request_id] = len(request.token_ids)
        return sorted(asks, key=lambda asked: asked.index)

    def _lag(self, source: Source, request: Request) -> int:
        if not source.costs_forwards:
            return 0
        lag = len(request.token_ids) - self._lengths.get((source.name, request.request_id), 0)
        return lag if lag > USUAL_LAG else 0

    def _is_worth(self, asked: Ask, rate: float) -> bool:
        request = asked.request
        if asks_for_drafts(request):
            return True
        gain = self._accounts.gain(asked.key, request.request_id)
        if gain <= 0.0 or not asked.lag:
            return gain > 0.0
        # Catching up is an investment: it has to come back before the request ends.
        steps = request.remaining / (1 + gain)
        return gain * steps > rate * self._drafting.catch_up(asked.key[0], asked.lag)

    def _probe(self, closed: Sequence[Ask]) -> list[Ask]:
        """The one of these for whom it is time to be asked although it seems not to pay."""
        key = closed[0].key
        by_id = {asked.request.request_id: asked for asked in closed}
        first = self._accounts.next_probe(key, list(by_id))
        probe_ms = self._probe_ms(key[0]) + self._drafting.catch_up(key[0], by_id[first].lag)
        if not self._accounts.may_probe(probe_ms):
            return []
        self._accounts.probe(key, first, probe_ms)
        return [by_id[first]]

    def _probe_ms(self, name: str) -> float:
        return self._drafting.milliseconds(name) + self._host_ms

    def settle(self, asks: Sequence[Ask], rate: float, host_ms: float, total_ms: float) -> None:
        """Book what a step's drafts promised and cost.

        Args:
            host_ms: of planning, which all of them share.
            total_ms: of the whole step.
        """
        self._accounts.passed(total_ms)
        if host_ms > 0.0:  # a hiccup of the machine counts as little as a usual step
            bounded = min(host_ms, 2 * self._host_ms) if self._host_ms else host_ms
            self._host_ms += HOST_PACE * (bounded - self._host_ms)
        shared_ms = min(host_ms, self._host_ms) / max(1, len(asks))
        for asked in asks:
            gain = asked.gain - rate * (asked.cost_ms + shared_ms)
            self._accounts.settle(asked.key, asked.request.request_id, gain)

    def finish(self, request: Request) -> None:
        """Forget a request."""
        self._accounts.finish(request.request_id)
        for name in self._keys:
            self._lengths.pop((name, request.request_id), None)


def asks_for_drafts(request: Request) -> bool:
    """Whether it says itself how much is to be drafted, so that nobody else decides it."""
    return request.params.speculative.num_speculative_tokens is not None
