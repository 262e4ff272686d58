"""Which replica answers a request: a policy over names and unfinished work. Knows no Ray, no HTTP.

A request goes where its answer can begin first: where what is still to be read, for the requests
before it and for itself, is least. A replica that has read the beginning of a prompt has its KV in
the prefix cache and reads the rest alone; what all replicas have read makes no difference. The one
that answered the caller last is preferred a little, as its suffix history drafts for the caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from paceline.ray.prompts import Traits

ANSWER = 8
"""Work of an answer, beside what its request reads: in parts of a prompt, of 256 bytes each."""
DRAFTS = 4
"""What the drafts of the caller's earlier answers are worth, in parts of a prompt."""
MAX_KEYS = 1 << 17


class Choice(NamedTuple):
    """A replica, and what the request adds to its work until it ends."""

    name: str
    work: int


class Affinity:
    """Remembers which replicas have read what, the latest ``max_keys`` hashes.

    Args:
        is_on: False chooses by the unfinished work alone, as if each prompt were read whole.
    """

    def __init__(self, *, is_on: bool = True, max_keys: int = MAX_KEYS) -> None:
        self._is_on, self._max_keys = is_on, max_keys
        self._readers: OrderedDict[int, set[str]] = OrderedDict()
        self._answered: OrderedDict[int, str] = OrderedDict()
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, traits: Traits, work: Mapping[str, int]) -> Choice:
        """The replica for a request, which is then taken to have read it.

        Args:
            work: of the unfinished requests of each replica, the sum of what their choices said;
                at least one.
        """
        known = self._known(traits.parts, work.keys()) if self._is_on else {}
        last = self._answered.get(traits.caller)

        def cost(name: str) -> tuple[int, int]:
            """Of equal ones the one that was not chosen for longest is the best."""
            beside = known.get(name, 0) + (DRAFTS if name == last else 0)
            return work[name] - beside, self._turns.get(name, 0)

        chosen = min(work, key=cost)
        self._note(traits, chosen, work.keys())
        return Choice(chosen, ANSWER + len(traits.parts) - known.get(chosen, 0))

    def _known(self, parts: Sequence[int], names: Set[str]) -> dict[str, int]:
        """How many leading parts of a prompt each replica has read; none is left out."""
        known, rest = dict[str, int](), set(names)
        for depth in range(len(parts), 0, -1):
            found = rest & self._readers.get(parts[depth - 1], set())
            known |= dict.fromkeys(found, depth)
            rest -= found
            if not rest:
                break
        return known

    def _note(self, traits: Traits, chosen: str, alive: Set[str]) -> None:
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
