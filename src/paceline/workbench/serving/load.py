"""Requests sent at their times, at most so many at once. Knows nothing of what they ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

from paceline.workbench.serving.client import Outcome

Send = Callable[[bytes, Outcome], Awaitable[None]]


async def run_load(
    send: Send,
    bodies: Sequence[bytes],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    on_finished: Callable[[int], None] = lambda finished: None,
) -> tuple[list[Outcome], float]:
    """Send every request at its time.

    Args:
        send: fills an outcome, and does not raise for what the server does.
        arrivals: seconds after the beginning, ascending, one per request.
        max_concurrency: further requests wait for their turn.
        on_finished: called with the number of requests that have ended.

    Returns:
        the outcomes in the requests' order, and the seconds from the beginning to the last end.
    """
    run = _Run(send, max_concurrency, on_finished)
    outcomes = [Outcome() for _ in bodies]
    async with asyncio.TaskGroup() as tasks:
        for body, arrival, outcome in zip(bodies, arrivals, outcomes, strict=True):
            wait = run.began + arrival - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.create_task(run.one(body, outcome))
    return outcomes, time.perf_counter() - run.began


class _Run:
    """What the requests of a run share."""

    def __init__(
        self, send: Send, max_concurrency: int | None, on_finished: Callable[[int], None]
    ) -> None:
        self._send = send
        self._turn = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
        self._on_finished = on_finished
        self._num_finished = 0
        self.began = time.perf_counter()

    async def one(self, body: bytes, outcome: Outcome) -> None:
        """Wait for the request's turn, send it, and say that it ended."""
        arrived = time.perf_counter()
        async with self._turn:
            sent = time.perf_counter()
            outcome.start, outcome.queued = sent - self.began, sent - arrived
            await self._send(body, outcome)
        self._num_finished += 1
        self._on_finished(self._num_finished)
