"""A server under faults: killed and stopped engines, and clients that never finish a request.

Clients stream from the embedded model all the time. Then the engine's process is killed again and
again, each time until the server answers anew; then it is stopped; then hundreds of connections
send half of their headers, or of their body. Every request must end, and what is no whole answer
must be an error with a code. What counts as a hang is a request that takes longer than
``PATIENCE``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Any

import httpx
from harness import arguments, chosen, note
from load_server import ENGINE_NAME, ServerProcess
from report import Report, Row, Target, grid, table

PATIENCE = 60.0
BACK_SECONDS = 3.0
HANG_SECONDS = 6.0
SETTLED_SECONDS = 10.5
"""Pause between two kills: an engine that has served so long is replaced at once."""
RECEIVE_SECONDS = 10.0
BODY = {"prompt": "def add(a, b):", "max_tokens": 48, "ignore_eos": True, "stream": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SLOW = (HEAD, HEAD + b"X-Slow: ", HEAD + b"Content-Length: 500\r\n\r\n{", b"")
"""What clients send that never finish."""


def whole(text: str) -> str:
    """How an answer ended: ``whole``, the code of its error, or what it is instead."""
    *_, last, done, rest = ("", "", *text.split("\n\n"))
    if done != "data: [DONE]" or rest:
        return "cut off"
    found = json.loads(last.removeprefix("data: "))
    return found["error"]["code"] or "no code" if "error" in found else "whole"


async def ask(client: httpx.AsyncClient, began: Callable[[], None] = lambda: None) -> str:
    """How one stream ended."""
    try:
        async with (
            asyncio.timeout(PATIENCE),
            client.stream("POST", "/v1/completions", json=BODY) as response,
        ):
            parts = []
            async for part in response.aiter_text():
                began()
                parts.append(part)
            text = "".join(parts)
            if response.status_code == 200:
                return whole(text)
            return json.loads(text)["error"]["code"] or f"status {response.status_code}"
    except TimeoutError:
        return "hang"
    except httpx.HTTPError as error:
        return f"lost: {type(error).__name__}"


class Crowd:
    """Clients that ask again and again, and how their requests ended."""

    def __init__(self, url: str, count: int) -> None:
        self.ends: Counter[str] = Counter()
        self._url, self._count = url, count
        self.num_begun = 0

    async def __aenter__(self) -> Crowd:
        self._over = asyncio.Event()
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def _client(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE) as client:
            while not self._over.is_set():
                begun = [False]

                def begin(begun: list[bool] = begun) -> None:
                    self.num_begun += not begun[0]
                    begun[0] = True

                end = await ask(client, begin)
                self.num_begun -= begun[0]
                self.ends[end] += 1
                if end != "whole":
                    await asyncio.sleep(0.02)  # as a client that tries again


async def until(condition: Callable[[], Awaitable[bool] | bool], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return True
        await asyncio.sleep(0.01)
    return False


def engine_of(server: ServerProcess) -> int | None:
    return next(iter(server.named(ENGINE_NAME)), None)


class Faults:
    """The faults of one server, one after the other; each gives a row."""

    def __init__(self, server: ServerProcess, options: argparse.Namespace) -> None:
        self._server, self._options = server, options
        self._url = f"http://127.0.0.1:{server.port}"
        self.samples: list[dict[str, Any]] = []

    async def _answers(self) -> bool:
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE) as client:
            return await ask(client) == "whole"

    async def killed(self) -> Row:
        seconds = []
        async with Crowd(self._url, self._options.streams) as crowd:
            for number in range(self._options.kills):
                await until(lambda: crowd.num_begun >= self._options.streams // 2)
                engine = engine_of(self._server)
                assert engine is not None
                os.kill(engine, signal.SIGKILL)
                began = time.monotonic()
                is_back = await until(self._answers)
                seconds.append(time.monotonic() - began)
                self.samples.append({"fault": "kill", "seconds": seconds[-1], "is_back": is_back})
                note(f"kill {number + 1}: back after {seconds[-1]:.2f} s, {dict(crowd.ends)}")
                await asyncio.sleep(max(0.0, SETTLED_SECONDS))
        return self._row("killed engine", crowd, seconds)

    async def stopped(self) -> Row:
        """The engine hangs, and is killed by the server; and goes on by itself before that."""
        seconds = []
        async with Crowd(self._url, self._options.streams) as crowd:
            for goes_on in (True, False):
                await until(lambda: crowd.num_begun >= self._options.streams // 2)
                engine = engine_of(self._server)
                assert engine is not None
                os.kill(engine, signal.SIGSTOP)
                began = time.monotonic()
                if goes_on:
                    await asyncio.sleep(HANG_SECONDS / 2)
                    os.kill(engine, signal.SIGCONT)
                await until(self._answers)
                seconds.append(time.monotonic() - began)
                note(f"stop: back after {seconds[-1]:.2f} s, {dict(crowd.ends)}")
                await asyncio.sleep(SETTLED_SECONDS)
        return self._row("stopped engine", crowd, seconds)

    async def slow(self) -> Row:
        """Clients that send a part of a request and then nothing."""
        connections = [
            await asyncio.open_connection("127.0.0.1", self._server.port)
            for _ in range(self._options.slow)
        ]
        for number, (_, writer) in enumerate(connections):
            writer.write(SLOW[number % len(SLOW)])
        seconds = []
        async with Crowd(self._url, self._options.streams) as crowd:
            for _ in range(10):
                began = time.monotonic()
                await self._answers()
                seconds.append(time.monotonic() - began)
                await asyncio.sleep(0.2)
            closed = [asyncio.create_task(reader.read()) for reader, _ in connections]
            done, open_ = await asyncio.wait(closed, timeout=RECEIVE_SECONDS + PATIENCE)
        for _, writer in connections:
            writer.close()
        note(f"{len(done)} of {len(closed)} slow clients were sent away, {dict(crowd.ends)}")
        return {**self._row("slow clients", crowd, seconds), "left_open": len(open_)}

    @staticmethod
    def _row(fault: str, crowd: Crowd, seconds: Sequence[float]) -> Row:
        return {
            "fault": fault,
            "times": len(seconds),
            "median_seconds": median(seconds),
            "most_seconds": max(seconds),
            "requests": sum(crowd.ends.values()),
            "ends": dict(crowd.ends),
            "hangs": crowd.ends["hang"],
            "untyped": sum(n for end, n in crowd.ends.items() if _is_untyped(end)),
        }


def _is_untyped(end: str) -> bool:
    return end in ("cut off", "no code") or end.startswith(("lost", "status"))


async def story(server: ServerProcess, options: argparse.Namespace, report: Report) -> None:
    faults = Faults(server, options)
    report.results = [await faults.killed(), await faults.stopped(), await faults.slow()]
    report.samples = faults.samples


def targets(results: Sequence[Row]) -> list[Target]:
    killed, _, slow = results
    return [
        Target("seconds until a killed engine is replaced, the longest", killed["most_seconds"], 3),
        Target("requests that never ended", sum(row["hangs"] for row in results), 0),
        Target("requests without an answer or a code", sum(row["untyped"] for row in results), 0),
        Target("errors beside slow clients", slow["requests"] - slow["ends"].get("whole", 0), 0),
        Target("slow clients that were not sent away", slow["left_open"], 0),
    ]


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        ("fault", "fault"),
        ("times", "times"),
        ("serves again after s (median)", "median_seconds", 2),
        ("longest", "most_seconds", 2),
        ("requests", "requests"),
        ("hangs", "hangs"),
        ("without a code", "untyped"),
    )
    ends = sorted({end for row in results for end in row["ends"]})
    return [
        table(*grid(results, *columns)),
        table(
            ["requests ended", *(row["fault"] for row in results)],
            [[end, *(row["ends"].get(end, 0) for row in results)] for end in ends],
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.sized("--kills", 20, 2, "of the engine's process")
    parser.sized("--slow", 300, 60, "clients that never finish a request")
    parser.add_argument("--streams", type=int, default=8, help="clients at once")
    options = parser.parse_args(argv)
    report = Report("server_faults", chosen(options, "quick", "kills", "slow", "streams"))
    server = ServerProcess(
        *("--max-model-len", "512", "--kv-cache-memory", "32M", "--max-engine-restarts", "1000"),
        *("--hang-timeout", str(HANG_SECONDS), "--receive-timeout", str(RECEIVE_SECONDS)),
    )
    try:
        asyncio.run(story(server, options, report))
    finally:
        code = server.end()
    if code:
        report.samples.append({"error": f"the server ended with code {code}"})
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
