"""Which replica answers a request: a policy over names and unfinished work. Knows no Ray, no HTTP.

A request goes where its answer can begin first: where what is still to be read, for the requests
before it and for itself, is least. A replica that has read the beginning of a prompt has its KV in
the prefix cache and reads the rest alone; what all replicas have read makes no difference.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

ANSWER = 8
"""Work of an answer, beside what its request reads: in parts of a prompt, of 256 bytes each."""
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
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, parts: Sequence[int], work: Mapping[str, int]) -> Choice:
        """The replica for a request, which is then taken to have read it.

        Args:
            parts: a hash of each leading part of the prompt with all before it.
            work: of the unfinished requests of each replica, the sum of what their choices said;
                at least one.
        """
        known = self._known(parts, work.keys()) if self._is_on else {}

        def cost(name: str) -> tuple[int, int]:
            """Of equal ones the one that was not chosen for longest is the best."""
            return work[name] - known.get(name, 0), self._turns.get(name, 0)

        chosen = min(work, key=cost)
        self._note(parts, chosen, work.keys())
        return Choice(chosen, ANSWER + len(parts) - known.get(chosen, 0))

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

    def _note(self, parts: Sequence[int], chosen: str, alive: Set[str]) -> None:
        self._turn += 1
        self._turns = {name: self._turns.get(name, 0) for name in alive} | {chosen: self._turn}
        if not self._is_on:
            return
        for part in parts:
            self._readers[part] = (self._readers.pop(part, set()) & alive) | {chosen}
        while len(self._readers) > self._max_keys:
            self._readers.popitem(last=False)
