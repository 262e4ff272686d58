"""Which replica answers a request: a policy over names and loads. Knows no Ray and no HTTP.

A request goes where most of its prompt was read before, so that its KV is in that replica's prefix
cache; otherwise to the replica that answered its caller last, whose suffix history then drafts for
it. A replica that is busier than the least busy one by more than a threshold is passed over. What
remains is the power of two choices: of two replicas drawn at random, the less busy one
(M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from paceline.ray.prompts import Traits

THRESHOLD = 2
"""Unfinished requests by which a replica may be busier before its caches do not count."""
MAX_KEYS = 1 << 17
_LEAST_SHARE = 0.5


class Affinity:
    """Remembers which replicas have read what, the latest ``max_keys`` hashes.

    Args:
        is_on: False chooses by load alone.
        rng: draws the two of the power of two choices.
    """

    def __init__(
        self,
        threshold: int = THRESHOLD,
        *,
        is_on: bool = True,
        max_keys: int = MAX_KEYS,
        rng: random.Random | None = None,
    ) -> None:
        self._threshold, self._is_on, self._max_keys = threshold, is_on, max_keys
        self._rng = rng or random.Random()
        self._readers: OrderedDict[int, set[str]] = OrderedDict()
        self._answered: OrderedDict[int, str] = OrderedDict()
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, traits: Traits, loads: Mapping[str, int]) -> str:
        """The replica for a request, which is then taken to have read it.

        Args:
            loads: unfinished requests by replica; at least one.
        """
        least = min(loads.values())
        open_to = {name: load for name, load in loads.items() if load - least <= self._threshold}
        wanted = self._wanted(traits, open_to) if self._is_on else []
        chosen = self._least_busy(wanted or self._two(loads), loads)
        self._note(traits, chosen, set(loads))
        return chosen

    def _wanted(self, traits: Traits, open_to: Mapping[str, int]) -> list[str]:
        """Replicas whose caches suit the request; all of the same worth."""
        for depth in range(len(traits.parts), 0, -1):
            readers = open_to.keys() & self._readers.get(traits.parts[depth - 1], set())
            if readers:
                break
        else:
            depth, readers = 0, set()
        is_most = depth >= _LEAST_SHARE * len(traits.parts)
        last = self._answered.get(traits.caller)
        if last is not None and last in open_to and not (readers and is_most):
            return [last]
        return sorted(readers)

    def _two(self, loads: Mapping[str, int]) -> list[str]:
        return self._rng.sample(sorted(loads), min(2, len(loads)))

    def _least_busy(self, names: Sequence[str], loads: Mapping[str, int]) -> str:
        """Of equally busy ones the one that was not chosen for longest."""
        return min(names, key=lambda name: (loads[name], self._turns.get(name, 0)))

    def _note(self, traits: Traits, chosen: str, alive: set[str]) -> None:
        self._turn += 1
        self._turns = {name: self._turns.get(name, 0) for name in alive} | {chosen: self._turn}
        if not self._is_on:
            return
        for part in traits.parts:
            self._readers[part] = (self._readers.pop(part, set()) & alive) | {chosen}
        if traits.caller:
            self._answered[traits.caller] = chosen
            self._answered.move_to_end(traits.caller)
        for table in (self._readers, self._answered):
            while len(table) > self._max_keys:
                table.popitem(last=False)
