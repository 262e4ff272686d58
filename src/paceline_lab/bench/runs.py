"""A benchmark of one server, tried, warmed up, measured and counted; and of two in turns.

An :class:`ServerArm` is one server under measurement; comparing has two of them. They get the same
requests in alternating blocks, paired prompt by prompt, so that what slows the machine down for a
while slows both. Each block begins with an empty prefix cache where the server can flush it, and
the arm that begins alternates. Requests are sent at their times, at most so many at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from paceline_lab.bench import server
from paceline_lab.bench.client import (
    BACKENDS,
    Outcome,
    RequestSampling,
    Sample,
    Target,
    aiohttp,
    make_bodies,
    send,
)
from paceline_lab.bench.figures import METRICS, PER_REQUEST, figures_of
from paceline_lab.bench.server import Counters
from paceline_lab.bootstrap import ratio_interval

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
    sampling: RequestSampling = field(default_factory=RequestSampling)
    trial: Sample | None = None
    warmups: Sequence[Sample] = ()
    max_concurrency: int | None = None


@dataclass(slots=True)
class ServerArm:
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
        load = figures_of(self.outcomes, self.seconds, percentiles, goodput)
        return load | server.speculation_figures(self.speculation or {})


async def run_benchmark(
    arm: ServerArm, workload: Workload, on_finished: OnFinished = lambda finished: None
) -> None:
    """Measure one server; raises as :meth:`ServerArm.prepare`."""
    await arm.prepare(workload)
    bodies = make_bodies(arm.target, workload.samples, workload.sampling)
    await arm.measure(bodies, workload, 0, on_finished)


@dataclass(slots=True)
class Comparison:
    """Two arms that were sent the same, and what follows from it.

    Attributes:
        block: requests of one block.
        flushed: for each arm, whether every block began with an empty prefix cache.
    """

    ours: ServerArm
    theirs: ServerArm
    block: int
    flushed: list[bool] = field(default_factory=lambda: [True, True])

    @property
    def pairs(self) -> list[tuple[int, Outcome, Outcome]]:
        """Place and outcomes of the requests that neither arm failed."""
        both = zip(self.ours.outcomes, self.theirs.outcomes, strict=True)
        return [(i, a, b) for i, (a, b) in enumerate(both) if not a.error and not b.error]

    @property
    def differing(self) -> list[int]:
        """Requests, counted from 0, whose texts are not the same."""
        return [i for i, a, b in self.pairs if a.text != b.text]

    def ratios(self) -> dict[str, Ratio]:
        """Ours over theirs: output tokens per second by block, times by request."""
        ratios_by_name: dict[str, Ratio | None] = {"output_throughput": self._throughput()}
        for name in PER_REQUEST:
            both = [(METRICS[name](a), METRICS[name](b)) for _, a, b in self.pairs]
            pairs = [(*ours, *theirs) for ours, theirs in both if ours and theirs]
            ratios_by_name[name] = ratio_of_medians([a for a, _ in pairs], [b for _, b in pairs])
        return {name: ratio for name, ratio in ratios_by_name.items() if ratio is not None}

    def _throughput(self) -> Ratio | None:
        """Over blocks that both arms answered in full: a failed request would count as speed."""
        whole = [
            place
            for place in range(len(self.ours.block_seconds))
            if not any(o.error for arm in (self.ours, self.theirs) for o in self._part(arm, place))
        ]
        ours, theirs = (
            [self._rate(arm, place) for place in whole] for arm in (self.ours, self.theirs)
        )
        return ratio_of_medians(ours, theirs)

    def _part(self, arm: ServerArm, place: int) -> Sequence[Outcome]:
        return arm.outcomes[place * self.block : (place + 1) * self.block]

    def _rate(self, arm: ServerArm, place: int) -> float:
        tokens = sum(outcome.output_len for outcome in self._part(arm, place))
        return tokens / arm.block_seconds[place]


async def run_comparison(
    ours: ServerArm,
    theirs: ServerArm,
    workload: Workload,
    on_finished: Callable[[int], None] = lambda finished: None,
) -> Comparison:
    """Measure both arms in turns.

    Args:
        on_finished: called with the number of requests that have ended, of both arms.

    Raises:
        BenchmarkError: a server fails the trial.
    """
    arms = (ours, theirs)
    for arm in arms:
        await arm.prepare(workload)
    count = len(workload.samples)
    comparison = Comparison(ours, theirs, block_size(count, workload.max_concurrency or 1))
    bodies = [make_bodies(arm.target, workload.samples, workload.sampling) for arm in arms]
    done = 0
    for number, first in enumerate(range(0, count, comparison.block)):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            arm, part = arms[which], bodies[which][first : first + comparison.block]
            comparison.flushed[which] &= await server.flush_prefix_cache(
                arm.session, arm.target.url
            )
            await arm.measure(part, workload, first, after(done, on_finished))
            done += len(part)
    return comparison


MIN_PAIRS = 2
MIN_BLOCKS = 10
"""Blocks that a comparison is cut into where the concurrency leaves so many."""


def block_size(count: int, concurrency: int) -> int:
    """Requests of a block: enough for the concurrency, and otherwise :data:`MIN_BLOCKS` blocks."""
    return min(count, max(concurrency, -(-count // MIN_BLOCKS)))


def after(done: int, advance: Callable[[int], None]) -> Callable[[int], None]:
    """What a block calls with the number that it has done, where so many were done before it."""
    return lambda finished: advance(done + finished)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two medians, one over the other, and the middle 95 % of the bootstrap.

    Attributes:
        low, high: None where there are too few pairs to draw from.
    """

    ours: float
    theirs: float
    value: float
    low: float | None
    high: float | None
    num_pairs: int

    @property
    def interval(self) -> str:
        """The interval as text."""
        if self.low is None or self.high is None:
            return "-"
        return f"{self.low:.3f} to {self.high:.3f}"


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> Ratio | None:
    """The median of ``ours`` over that of ``theirs``; None without pairs or with a median of 0.

    Args:
        ours, theirs: of equal length, the same prompt or block in the same place.
    """
    pairs = np.array([ours, theirs], dtype=float)
    count = pairs.shape[1]
    if not count:
        return None
    above, below = (float(each) for each in np.median(pairs, axis=1))
    if not below:
        return None
    low = high = None
    if count >= MIN_PAIRS:
        low, high = ratio_interval(pairs, np.median)
    return Ratio(above, below, above / below, low, high, count)
