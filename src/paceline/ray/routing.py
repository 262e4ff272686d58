"""Which replica answers a request: a policy over prompts, names and unfinished work. Knows no Ray.

A request goes where its answer can begin first: where what is still to be read, for the requests
before it and for itself, is least. A replica that has read the beginning of a prompt has its KV in
the prefix cache and reads the rest alone; what all replicas have read makes no difference. Without
a tokenizer, hashes of a prompt's leading parts tell which requests begin alike; bodies that cannot
be read have none, and the replica says what is wrong with them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import xxhash
from pydantic_core import from_json, to_json

ANSWER = 8
"""Work of an answer, without what its request reads: in parts of a prompt, of 256 bytes each."""
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
        """How many leading parts of a prompt each replica has read."""
        known, rest = dict[str, int](), set(names)
        for depth in range(len(parts), 0, -1):
            readers = rest & self._readers.get(parts[depth - 1], set())
            known |= dict.fromkeys(readers, depth)
            rest -= readers
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


PART_BYTES = 256
MAX_PARTS = 256
_PROMPTS = ("system", "instructions", "tools", "messages", "input", "prompt", "input_prefix")
"""Fields of the served APIs with a prompt's text, in the order in which templates write it."""
_KEY_HEADERS = (b"authorization", b"x-api-key")


def parts_of(body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> tuple[int, ...]:
    """A hash of each leading part of the prompt in this JSON body with all that is before it.

    The parts begin with the API key and ``cache_salt``, across which no KV is shared.
    """
    try:
        document = from_json(body)
    except ValueError:
        return ()
    if not isinstance(document, dict):
        return ()
    key = [value for name, value in headers if name in _KEY_HEADERS]
    seed = xxhash.xxh3_64_intdigest(b"\0".join((*key, _json(document.get("cache_salt")))))
    return tuple(_hashes(document, seed))


def _hashes(document: Mapping[str, Any], value: int) -> Iterator[int]:
    """A hash for each part; the last part of each message or text may be short."""
    count = 0
    for name in _PROMPTS:
        field = document.get(name)
        if not field:
            continue
        is_list_of_texts = isinstance(field, list) and isinstance(field[0], dict)
        for text in field if is_list_of_texts else (field,):
            data = text.encode("utf-8", "replace") if isinstance(text, str) else _json(text)
            for start in range(0, len(data), PART_BYTES):
                value = xxhash.xxh3_64_intdigest(data[start : start + PART_BYTES], seed=value)
                yield value
                count += 1
                if count == MAX_PARTS:
                    return


def _json(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="constants")
