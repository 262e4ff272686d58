"""Clocks of tests: one that stands still until it is told, and one that skips all waiting."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any


class HeldClock:
    """The time that :mod:`paceline.server.http.sse` knows: no client is late on a slow machine."""

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


class SkippedTime:
    """Seconds that pass only when a loop has nothing left to do but to wait for them.

    They take no time then, and what is computed takes none of them: an hour is exact and over at
    once on any machine. For applications that are called without a socket or a process of their
    own, whose events this clock could not see coming; threads of the loop's executor are waited
    for.
    """

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def run(self, story: Coroutine[Any, Any, Any]) -> Any:
        """``asyncio.run`` in this time."""
        with asyncio.Runner(loop_factory=lambda: _Loop(self)) as runner:
            return runner.run(story)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: SkippedTime) -> None:
        self.clock = clock
        self.num_in_threads = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = super().run_in_executor(executor, func, *args)
        self.num_in_threads += 1
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, future: object) -> None:
        self.num_in_threads -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        await super().shutdown_default_executor()  # however long its threads take


class _Selector(selectors.DefaultSelector):
    """Waits for events, but not for time."""

    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or self._loop.num_in_threads:
            return super().select(timeout if timeout == 0 else None)
        found = super().select(0)
        if not found:
            self._loop.clock.now += max(timeout, 0.0)
        return found
