"""A benchmark of one server: tried, warmed up, measured, counted.

An :class:`Arm` is one server under measurement; comparing has two of them.

Requests are sent at their times, at most so many at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from paceline.workbench.serving import server
from paceline.workbench.serving.client import Outcome, send
from paceline.workbench.serving.extra import aiohttp
from paceline.workbench.serving.figures import figures_of
from paceline.workbench.serving.requests import BACKENDS, Sample, Sampling, Target, make_bodies
from paceline.workbench.serving.server import Counters

Send = Callable[[bytes, Outcome], Awaitable[None]]
OnFinished = Callable[[int], None]


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
    turn = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    began, numbers = time.perf_counter(), count(1)

    async def one(body: bytes, outcome: Outcome) -> None:
        arrived = time.perf_counter()
        async with turn:
            sent = time.perf_counter()
            outcome.start, outcome.queued = sent - began, sent - arrived
            await send(body, outcome)
        on_finished(next(numbers))

    outcomes = [Outcome() for _ in bodies]
    async with asyncio.TaskGroup() as tasks:
        for body, arrival, outcome in zip(bodies, arrivals, outcomes, strict=True):
            wait = began + arrival - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.create_task(one(body, outcome))
    return outcomes, time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent, and when.

    Attributes:
        arrivals: seconds after the beginning, one per sample.
        trial: sent first and alone; when it fails there is no run.
        warmups: sent next, and not measured either.
    """

    samples: Sequence[Sample]
    arrivals: Sequence[float]
    sampling: Sampling = field(default_factory=Sampling)
    trial: Sample | None = None
    warmups: Sequence[Sample] = ()
    max_concurrency: int | None = None


@dataclass(slots=True)
class Arm:
    """One server and everything that was measured of it so far.

    Attributes:
        seconds: of the measured parts, summed.
        speculation: counted by the server during these; None where it does not say.
    """

    session: aiohttp.ClientSession
    target: Target
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    block_seconds: list[float] = field(default_factory=list)
    speculation: Counters | None = None

    @property
    def url(self) -> str:
        return f"{self.target.url}{BACKENDS[self.target.backend]}"

    async def prepare(self, workload: Workload) -> None:
        """Try one request, and warm up; ``BenchmarkError`` where the server fails the trial."""
        if workload.trial is not None:
            (trial,) = make_bodies(self.target, [workload.trial], workload.sampling)
            await server.try_request(self.session, self.url, trial)
        bodies = make_bodies(self.target, workload.warmups, workload.sampling)
        await run_load(self._send, bodies, [0.0] * len(bodies), workload.max_concurrency)

    async def measure(
        self, bodies: Sequence[bytes], workload: Workload, first: int, on_finished: OnFinished
    ) -> None:
        """Send requests ``first`` and following, at their distances in time, and keep the outcomes.

        Bodies are those of this part alone.
        """
        arrivals = workload.arrivals[first : first + len(bodies)]
        began = workload.arrivals[first - 1] if first else 0.0
        before = await server.counters(self.session, self.target.url)
        outcomes, seconds = await run_load(
            self._send,
            bodies,
            [arrival - began for arrival in arrivals],
            workload.max_concurrency,
            on_finished,
        )
        after = await server.counters(self.session, self.target.url)
        for outcome in outcomes:
            outcome.start += self.seconds
        self.outcomes += outcomes
        self.seconds += seconds
        self.block_seconds.append(seconds)
        if before is not None and after is not None:
            self.speculation = server.growth(before, after, self.speculation or {})

    async def _send(self, body: bytes, outcome: Outcome) -> None:
        await send(self.session, self.url, body, outcome)

    def figures(
        self, percentiles: Sequence[float], goodput: dict[str, float] | None
    ) -> dict[str, Any]:
        """Under vLLM's keys."""
        found = figures_of(self.outcomes, self.seconds, percentiles, goodput)
        return found | server.speculation_figures(self.speculation or {})


async def run_benchmark(
    arm: Arm, workload: Workload, on_finished: OnFinished = lambda finished: None
) -> None:
    """Measure one server; raises as :meth:`Arm.prepare`."""
    await arm.prepare(workload)
    bodies = make_bodies(arm.target, workload.samples, workload.sampling)
    await arm.measure(bodies, workload, 0, on_finished)
