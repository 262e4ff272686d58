"""A clock of answers that stands still until a test lets time pass."""

from __future__ import annotations

import asyncio
import time
from typing import Any


class HeldClock:
    """What :mod:`paceline.server.sse` knows of time: on a slow machine nobody is late either."""

    def __init__(self) -> None:
        self._now = time.monotonic()

    def monotonic(self) -> float:
        return self._now

    def passes(self, seconds: float) -> None:
        self._now += seconds

    async def first_of(
        self, one: asyncio.Task[Any], other: asyncio.Task[Any], seconds: float
    ) -> None:
        """Wait for a task or for so much of this time."""
        end = self._now + seconds
        while True:
            await asyncio.wait((one, other), timeout=0.005, return_when=asyncio.FIRST_COMPLETED)
            if one.done() or other.done() or self._now >= end:
                return
