"""Responses that are kept for later ones to go on from: bounded in bytes and in time.

Whose they are is part of their name, so that no key finds another key's. What was used longest ago
goes first. They are kept as JSON, which is as large as it says. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.server.http.sse import encode_json

MAX_BYTES = 64 << 20
MAX_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Kept:
    """A response and what was said up to its end, each as JSON.

    Attributes:
        document: as it was answered.
        input: its own input items.
        items: all items of the conversation, its output included.
        output_ids: of the items of its output.
    """

    document: bytes
    input: bytes
    items: bytes
    output_ids: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        document: dict[str, Any],
        before: Sequence[dict[str, Any]],
        input: Sequence[dict[str, Any]],
    ) -> Kept:
        """Args: before: items of the conversation that the response went on from."""
        items = [*before, *input, *document["output"]]
        ids = tuple(item["id"] for item in document["output"])
        return cls(encode_json(document), encode_json(input), encode_json(items), ids)

    @property
    def num_bytes(self) -> int:
        return len(self.document) + len(self.input) + len(self.items)


class ResponseStore:
    """See the module's docstring."""

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes, self._max_seconds, self._clock = max_bytes, max_seconds, clock
        # What ends first stands first: whoever uses one moves it to the end.
        self._kept: OrderedDict[tuple[str, str], tuple[Kept, float]] = OrderedDict()
        self._owners: dict[tuple[str, str], str] = {}  # of items of outputs
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, caller: str, response_id: str, kept: Kept) -> None:
        """Keep a response, unless it is larger than all that there is room for."""
        self.drop(caller, response_id)
        if kept.num_bytes <= self._max_bytes:
            self._kept[caller, response_id] = kept, self._clock() + self._max_seconds
            self.num_bytes += kept.num_bytes
            self._owners |= {(caller, item_id): response_id for item_id in kept.output_ids}
        self._make_room()

    def find(self, caller: str, response_id: str) -> Kept | None:
        """None where there is no such response, or no more."""
        self._make_room()
        found = self._kept.pop((caller, response_id), None)
        if found is None:
            return None
        self._kept[caller, response_id] = found[0], self._clock() + self._max_seconds
        return found[0]

    def owner(self, caller: str, item_id: str) -> str | None:
        """The id of the response whose output an item is of; None where it is not kept."""
        return self._owners.get((caller, item_id))

    def drop(self, caller: str, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        found = self._kept.pop((caller, response_id), None)
        if found is None:
            return False
        self.num_bytes -= found[0].num_bytes
        for item_id in found[0].output_ids:
            del self._owners[caller, item_id]
        return True

    def _make_room(self) -> None:
        while self._kept:
            name, (_, until) = next(iter(self._kept.items()))
            if self.num_bytes <= self._max_bytes and until > self._clock():
                return
            self.drop(*name)
