"""Who is asked for drafts, decided before drafting is paid for. Knows no trees and no forwards.

A proposer is asked for a request whose account says that it pays; where it does not, one request at
a time is probed when there is time for it. Which account that is depends for one at whose drafts
one can glance on what it would draft, for others on what was drafted before them.
A draft model that has to read a prompt first is asked if that comes back before the request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from paceline.policy.accounts import Accounts, Key, situation
from paceline.policy.allowance import Allowance
from paceline.policy.asks import Ask, asks_for_drafts, delays
from paceline.policy.drafting_cost import USUAL_LAG, DraftingCost
from paceline.policy.planner import Drafts, Source
from paceline.policy.selection import expected_tokens
from paceline.request import Request
from paceline.span import DraftTree

HOST_PACE = 0.2
"""Weight of the latest step in the time that planning takes."""
USUAL_HOST_MS = 0.1
"""What planning takes about, where nobody has measured it."""
DELAY_SHARE = 0.02
"""Share of the time that forwards may take in which nothing is drafted for some of the requests."""


class Asking:
    """See the module's docstring.

    Args:
        drafting: what drafting costs.
        host_ms: what planning takes, as far as it is known beforehand. It is not learnt from the
            first steps alone: those are slow in every program.
    """

    def __init__(self, drafting: DraftingCost, host_ms: float = USUAL_HOST_MS) -> None:
        self._drafting = drafting
        self._host_ms = host_ms
        self._accounts = Accounts()
        self._delaying = Allowance(DELAY_SHARE)
        self._sources: dict[str, Source] = {}
        # By proposer and request: how long its text was at the last glance, and what that said.
        self._glances: dict[tuple[str, int], tuple[int, Key | None]] = {}
        self._least_probe_ms: dict[str, float] = {}
        self.set_sources(())

    def set_sources(self, sources: Sequence[Source]) -> None:
        """Begin anew with other proposers: what one brought says nothing of another.

        Where all that there were stay and others join them, what they brought is kept.
        """
        if not all(source in sources for source in self._sources.values()):
            self._accounts, self._least_probe_ms = Accounts(), {}
        self._glances.clear()
        known = self._least_probe_ms
        self._least_probe_ms = {source.name: known.get(source.name, 0.0) for source in sources}
        self._sources = {source.name: source for source in sources}

    def is_anyone_worth_asking(self, requests: Sequence[Request], rate: float) -> bool:
        """Whether any proposer is to be asked for any of the requests, which allow it.

        Looks at the accounts of what is asked first; the others come after it in the same step.
        """
        if not requests:
            return False
        if any(map(asks_for_drafts, requests)) or self.sees_promise(requests, rate):
            return True
        for name, source in self._sources.items():
            if (
                source.glance is None
                and any(map(source.applies, requests))
                and self._pays_or_is_probed((name, 0), rate)
            ):
                return True
        return not self._sources

    @property
    def num_glanced(self) -> int:
        """Proposers at whose drafts one can glance."""
        return sum(source.glance is not None for source in self._sources.values())

    def sees_promise(self, requests: Sequence[Request], rate: float) -> bool:
        """Whether any of those proposers is to be asked now, for what it would draft."""
        for source in self._sources.values():
            if source.glance is not None:
                for request in requests:
                    if source.applies(request) and self._is_promising(source, request, rate):
                        return True
        return False

    def pays_for_all(self, requests: Sequence[Request], rate: float) -> bool:
        """Whether for each request some proposer is expected to pay, if it is asked first."""
        return all(self._pays(request, rate) for request in requests)

    def _pays(self, request: Request, rate: float) -> bool:
        for source in self._sources.values():
            if source.applies(request):
                key = self._key(source, request, ())
                if key is not None and self._accounts.gain(key, rate) > 0.0:
                    return True
        return False

    def _key(self, source: Source, request: Request, drafts: Sequence[DraftTree]) -> Key | None:
        """The account by which it is decided whether to ask; None: it is known to be in vain."""
        if source.glance is None:
            return source.name, situation(expected_tokens(drafts))
        if asks_for_drafts(request):
            return source.name, 0
        return self._key_at_a_glance(source, request)

    def _is_promising(self, source: Source, request: Request, rate: float) -> bool:
        key = self._key_at_a_glance(source, request)
        return key is not None and self._pays_or_is_probed(key, rate)

    def _pays_or_is_probed(self, key: Key, rate: float) -> bool:
        """Whether a proposer is worth asking, or it is time to see whether it is."""
        probing = self._accounts.probing[key[0]]
        return self._accounts.gain(key, rate) > 0.0 or probing.covers(self._first_probe_ms(key[0]))

    def _key_at_a_glance(self, source: Source, request: Request) -> Key | None:
        """The account by what it would draft for a request; None: it would draft nothing."""
        assert source.glance is not None
        place, length = (source.name, request.request_id), len(request.token_ids)
        known = self._glances.get(place)
        if known is not None and known[0] == length:
            return known[1]
        key, promised = None, source.glance(request)
        if promised > 0.0:
            key = source.name, situation(promised)
            self._accounts.open(key, promised, self._probe_ms(source.name))
        self._glances[place] = length, key
        return key

    def rest_ms(self, requests: Sequence[Request]) -> float:
        """Time in which nobody becomes worth asking for these requests if nobody is now."""
        probing = self._accounts.probing
        return min(
            (
                probing[name].milliseconds_until(self._first_probe_ms(name))
                for name, source in self._sources.items()
                if source.glance is None and any(map(source.applies, requests))
            ),
            default=inf,
        )

    def _first_probe_ms(self, name: str) -> float:
        """Time of the next probe of a proposer; it stays while nobody is asked."""
        return max(self._least_probe_ms[name], self._probe_ms(name))

    def ask(
        self,
        source: Source,
        requests: Sequence[Request],
        candidates: Sequence[int],
        drafts: Drafts,
        rate: float,
        needy: Sequence[int] = (),
    ) -> list[Ask]:
        """For which of the candidates a proposer drafts.

        Args:
            requests: of the step; ``candidates`` and ``drafts`` as in
                :meth:`~paceline.policy.planner.Planner.ask`.
            rate: tokens that a millisecond is worth.
            needy: places of requests that cannot wait for the drafts of others alone.
        """
        name = source.name
        if name not in self._sources:
            self._sources[name], self._least_probe_ms[name] = source, 0.0
        asks: list[Ask] = []
        closed: dict[Key, list[Ask]] = {}
        for i in candidates:
            request = requests[i]
            lag = source.lag(request)
            if lag is None:
                continue
            key = self._key(source, request, drafts[i])
            if key is None:
                continue
            lag = lag if lag > USUAL_LAG else 0
            asked = Ask(key, i, request, lag, len(candidates))
            if self._is_worth(asked, rate):
                asks.append(asked)
            else:
                closed.setdefault(asked.key, []).append(asked)
        if needy and not {asked.index for asked in asks}.issuperset(needy):
            return [asked for asked in asks if asks_for_drafts(asked.request)]
        if closed:
            # Where others have drafted least, or where it promises most.
            asks += self._probe(closed[(max if source.glance else min)(closed)])
            asks.sort(key=lambda asked: asked.index)
        if source.costs_forwards and asks and not self._may_delay(asks, requests):
            return []
        return asks

    def _is_worth(self, asked: Ask, rate: float) -> bool:
        request = asked.request
        gain = self._accounts.gain(asked.key, rate)
        if (gain > 0.0 and not asked.lag) or asks_for_drafts(request):
            return True
        if gain <= 0.0:
            return False
        # Catching up is an investment: it has to come back before the request ends, in the usual
        # situation, in which nobody else drafts.
        usual = asked.key[0], 0
        gain = min(gain, self._accounts.gain(usual, rate))
        steps = request.remaining / (1 + gain)
        return gain * steps > rate * self._drafting.catch_up(asked.key[0], asked.lag)

    def _may_delay(self, asks: Sequence[Ask], requests: Sequence[Request]) -> bool:
        """Whether those for whom nothing would be drafted can wait meanwhile."""
        if not delays(asks, requests):
            return True
        name = asks[0].key[0]
        reading_ms = self._drafting.catch_up(name, sum([asked.lag for asked in asks]))
        return self._delaying.covers(self._drafting.milliseconds(name) + reading_ms)

    def drafted(
        self, asks: Sequence[Ask], requests: Sequence[Request], milliseconds: float
    ) -> None:
        """Note how long forwards took that drafted for some of a step's requests."""
        if delays(asks, requests):
            self._delaying.spend(milliseconds)

    def _probe(self, closed: Sequence[Ask]) -> list[Ask]:
        """The one of these for whom it is time to be asked although it seems not to pay."""
        key, accounts = closed[0].key, self._accounts
        name, least = key[0], inf
        probe_ms = self._probe_ms(name)
        by_id = {asked.request.request_id: asked for asked in closed}
        for request_id in accounts.by_waiting(key, by_id):
            cost_ms = probe_ms + self._drafting.catch_up(name, by_id[request_id].lag)
            if cost_ms == least:  # most lack nothing, so that one stands for all
                continue
            least = min(least, cost_ms)
            if accounts.probing[name].covers(cost_ms):
                accounts.probe(key, request_id, cost_ms)
                self._least_probe_ms[name] = 0.0
                return [by_id[request_id]]
        self._least_probe_ms[name] = least
        return []

    def _probe_ms(self, name: str) -> float:
        return self._drafting.milliseconds(name) + self._host_ms

    def settle(self, asks: Sequence[Ask], host_ms: float, total_ms: float) -> None:
        """Book what a step's drafts promised and cost.

        Who is still catching up, or asked for drafts at any price, is not booked.

        Args:
            host_ms: of planning, which all of them share.
            total_ms: of the whole step.
        """
        self.pass_time(total_ms)
        if not asks:
            return
        if host_ms > 0.0:  # a hiccup of the machine counts as little as a usual step
            self._host_ms += HOST_PACE * (min(host_ms, 2 * self._host_ms) - self._host_ms)
        shared_ms = min(host_ms, self._host_ms) / len(asks)
        for asked in asks:
            if not asked.lag and not asks_for_drafts(asked.request):
                self._accounts.settle(asked.key, asked.gain, asked.cost_ms + shared_ms)

    def pass_time(self, milliseconds: float) -> None:
        """Let time pass in which nobody is asked."""
        for name in self._sources:
            self._accounts.probing[name].passed(milliseconds)
        self._delaying.passed(milliseconds)

    def finish(self, request: Request) -> None:
        """Forget a request."""
        self._accounts.finish(request.request_id)
        for name in self._sources:
            self._glances.pop((name, request.request_id), None)
