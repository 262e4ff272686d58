"""A server under clients that abort, disconnect and read slowly, watched for what it loses.

Many streams at once draw from a set of requests whose answers are known: each has been run alone,
plainly, before. Every answer that completes must equal the known one in text, tokens, log-probs
and usage, whatever shared its batch, with speculation on, and what came of one that was given up
must be how the known one begins. Meanwhile the memory of the server's processes is read; in the
end no KV block, file or thread may be left over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import ROOT, arguments, chosen, note
from load_client import MANNERS, Connection, Known, answered, ask, bodies
from report import Report, Row, Target, grid, number, table

from paceline.build.default_drafts import default_speculative_config

HTTP, ENGINE = "HTTP process", "engine process"
ENGINE_NAME = "paceline-engine"
START_SECONDS = 300.0
_ALARMS = re.compile(r"Traceback|ERROR|CRITICAL|never retrieved|was never awaited|ASGI callable")


@dataclass(frozen=True, slots=True)
class Reading:
    """A process at one moment.

    Attributes:
        seconds: since the load began.
        resident: bytes.
    """

    process: str
    seconds: float
    resident: int
    files: int
    threads: int


class ServerProcess:
    """``paceline serve`` with these options, from its first answer to its end."""

    def __init__(self, *options: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-load-")
        self._log = Path(self._folder.name) / "log"
        command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *options]
        environment = {n: v for n, v in os.environ.items() if not n.startswith("PACELINE_")}
        environment["PYTHONPATH"] = str(ROOT / "src")
        environment["PACELINE_MODEL"] = "embedded"  # where the options name none
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            self.port = self._wait_until_it_serves()
        except BaseException:
            self.kill()
            raise
        self.pids = {HTTP: self._process.pid, ENGINE: self._engine_pid()}
        self._began = time.monotonic()

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def alarms(self) -> list[str]:
        """Lines of the log that should not be there."""
        return [line for line in self.log.splitlines() if _ALARMS.search(line)]

    def _wait_until_it_serves(self) -> int:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = re.search(r"^paceline serves .* at http://[^:]+:(\d+) ", self.log, re.M)
            if found:
                return int(found[1])
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"the server did not start: {self.log[-1000:]}")

    def _engine_pid(self) -> int:
        if found := self.named(ENGINE_NAME):
            return found[0]
        raise RuntimeError("the server has no engine process")

    def named(self, words: str) -> list[int]:
        """Those of its processes with these words in their name or command."""
        found = []
        for pid in self.family():
            with suppress(OSError):  # it has ended
                folder = Path(f"/proc/{pid}")
                if words in (folder / "comm").read_text() + (folder / "cmdline").read_text():
                    found.append(pid)
        return found

    def family(self) -> list[int]:
        """The server's own processes, besides the first."""
        return descendants(self._process.pid)

    def reset_clock(self) -> None:
        self._began = time.monotonic()

    def readings(self) -> list[Reading]:
        return [self._reading(name, pid) for name, pid in self.pids.items()]

    def _reading(self, name: str, pid: int) -> Reading:
        status = Path(f"/proc/{pid}/status").read_text()
        numbers = {key: int(value) for key, value in re.findall(r"^(\w+):\s*(\d+)", status, re.M)}
        files = len(os.listdir(f"/proc/{pid}/fd"))
        seconds = time.monotonic() - self._began
        return Reading(name, seconds, numbers["VmRSS"] * 1024, files, numbers["Threads"])

    def stats(self) -> dict[str, Any]:
        """What the server says of itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/stats", timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def kill(self) -> None:
        """As by the system; the engine's process is not asked."""
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Let it end by itself; its exit code."""
        return self._process.wait(120)

    def end(self) -> int:
        """Ask it to end; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        finally:
            self.kill()


def descendants(pid: int) -> list[int]:
    found = []
    with suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def growth(readings: Sequence[Reading], process: str, warm_up: float) -> dict[str, Any]:
    """Memory of a process over a load: medians of its first and last tenth after the warm-up."""
    own = [each for each in readings if each.process == process]
    warm = [each.resident for each in own if each.seconds >= warm_up]
    if not warm:
        return {"process": process, "error": "the load ended before its warm-up"}
    tenth = max(1, len(warm) // 10)
    first, last = statistics.median(warm[:tenth]), statistics.median(warm[-tenth:])
    return {
        "process": process,
        "resident_at_start": own[0].resident,
        "resident_after_warm_up": first,
        "resident_at_end": last,
        "most_resident": max(each.resident for each in own),
        "growth": last / first - 1,
        "most_files": max(each.files for each in own),
    }


MAX_MODEL_LEN = 512
KV_MEMORY = "10M"
"""Less than the streams could use: preemption is part of the load."""
CACHED_TOKENS = 16384
READING_SECONDS = 5.0
SETTLING_SECONDS = 30.0
WARM_UP = 0.2
"""Share of the time after which memory must not grow."""
GROWTH = 0.02
NUM_FIRST = 16
MEGABYTE = 1 << 20


@dataclass(slots=True)
class Load:
    """The clients of one server and what they met."""

    port: int
    known: Sequence[Known]
    ends_at: float
    done: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    async def stream(self, seed: int) -> None:
        """One client after the other, until time is up."""
        rng = random.Random(seed)
        connection: Connection | None = None
        while time.monotonic() < self.ends_at:
            manner = rng.choices(list(MANNERS), list(MANNERS.values()))[0]
            index = rng.randrange(len(self.known))
            if connection is not None and (manner == "slow" or rng.random() < 0.2):
                await connection.close()
                connection = None
            try:
                if connection is None:
                    connection = await Connection.open(self.port, manner == "slow")
                is_reusable = await ask(connection, self.known[index], manner, rng)
            except Exception as error:
                is_reusable = False
                note(f"{manner}, request {index}: {error!r:.500}")
                shown = f"{type(error).__name__}: {error}"[:2000]
                self.failures.append({"manner": manner, "request": index, "error": shown})
            self.done[manner] += 1
            if connection is not None and (not is_reusable or manner == "slow"):
                await connection.close()
                connection = None
        if connection is not None:
            await connection.close()


async def watched(load: Load, server: ServerProcess, streams: int) -> list[Reading]:
    """Run the load; the server's readings meanwhile."""
    readings: list[Reading] = []

    async def watch() -> None:
        while True:
            readings.extend(server.readings())
            await asyncio.sleep(READING_SECONDS)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(load.stream(seed) for seed in range(streams)))
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    return readings


def settled(server: ServerProcess, files: int) -> tuple[dict[str, Any], list[Reading]]:
    """What the server holds once nobody asks anything, or when patience is at its end."""
    deadline = time.monotonic() + SETTLING_SECONDS
    while True:
        stats, readings = server.stats(), server.readings()
        is_idle = not stats["running"] + stats["waiting"] and readings[0].files <= files
        if is_idle or time.monotonic() > deadline:
            return stats, readings
        time.sleep(0.2)


def speculative() -> str:
    """The default proposers, whose store of earlier answers is full when the warm-up ends."""
    configs = (
        replace(config, suffix_decoding_max_cached_tokens=CACHED_TOKENS)
        for config in default_speculative_config("embedded")
    )
    return json.dumps([asdict(config) for config in configs])


def run(options: argparse.Namespace, known: Sequence[Known], report: Report) -> None:
    server = ServerProcess(
        *("--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory", KV_MEMORY),
        *("--planner", options.planner, "--max-queue", str(8 * options.streams)),
        *("--speculative-config", speculative()),
    )
    try:
        asyncio.run(_each_once(server.port, known[:NUM_FIRST]))
        _, before = settled(server, 1 << 20)
        server.reset_clock()
        began = time.monotonic()
        load = Load(server.port, known, began + options.minutes * 60)
        readings = asyncio.run(watched(load, server, options.streams))
        seconds = time.monotonic() - began
        stats, after = settled(server, before[0].files)
        alarms = server.alarms
    finally:
        code = server.end()
    report.samples = [*map(asdict, readings), *load.failures, *({"error": a} for a in alarms)]
    if code:
        report.samples.append({"error": f"the server ended with code {code}"})
    warm_up = WARM_UP * options.minutes * 60
    report.results = [
        {"kind": "requests", "seconds": seconds, "done": dict(load.done), **_counted(stats)},
        *({"kind": "memory", **growth(readings, name, warm_up)} for name in (HTTP, ENGINE)),
    ]
    report.targets = [*targets(load, report.results), *leftovers(stats, before, after)]


async def _each_once(port: int, known: Sequence[Known]) -> None:
    """All kinds of requests, so that what is made once has been made."""

    async def one(each: Known) -> None:
        connection = await Connection.open(port)
        await ask(connection, each, "whole", random.Random(0))
        await connection.close()

    await asyncio.gather(*map(one, known))


def _counted(stats: dict[str, Any]) -> dict[str, Any]:
    names = ("steps", "emitted", "draft_tokens", "accepted")
    speculation = {name: stats["speculation"][name] for name in names}
    return {"tokens": stats["tokens"], "preemptions": stats["preemptions"], **speculation}


def targets(load: Load, results: Sequence[Row]) -> list[Target]:
    return [
        Target("answers that were lost, mixed up or wrong", len(load.failures), 0),
        Target("whole answers", load.done["whole"] + load.done["slow"], 1, "at least"),
        *(
            Target(f"growth of the {row['process']} after warm-up", row.get("growth"), GROWTH)
            for row in results[1:]
        ),
    ]


def leftovers(
    stats: dict[str, Any], before: Sequence[Reading], after: Sequence[Reading]
) -> list[Target]:
    return [
        Target("KV blocks in use at the end", stats["kv"]["used"], 0),
        Target("engine restarts", stats["restarts"], 0),
        *(
            Target(f"files left open, {old.process}", new.files - old.files, 0)
            for old, new in zip(before, after, strict=True)
        ),
    ]


def tables(results: Sequence[Row]) -> list[str]:
    def megabytes(name: str) -> Callable[[Row], str]:
        return lambda row: number(row[name] / MEGABYTE, 1) if name in row else "-"

    requests, *memory = results
    names = ("preemptions", "steps", "emitted", "draft_tokens", "accepted")
    columns = (
        ("memory", "process"),
        ("start MB", megabytes("resident_at_start")),
        ("warm MB", megabytes("resident_after_warm_up")),
        ("end MB", megabytes("resident_at_end")),
        ("growth", lambda row: row.get("error") or f"{row['growth']:+.2%}"),
        ("most files", "most_files"),
    )
    return [
        table(["clients that", "requests"], list(requests["done"].items())),
        table(names, [[requests[name] for name in names]]),
        table(*grid(memory, *columns)),
    ]


# --- the program ----------------------------------------------------------------------------------


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.sized("--minutes", 10.0, 1.0, "of load")
    parser.add_argument("--streams", type=int, default=64, help="clients at once")
    parser.sized("--num-requests", 96, 32, "distinct ones")
    parser.add_argument(
        "--planner",
        choices=("auto", "fixed"),
        default="fixed",
        help="fixed drafts also where it does not pay, so that every step has something to undo",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    settings = ("quick", "prompts", "minutes", "streams", "num_requests", "planner")
    report = Report("load_server", chosen(options, *settings))
    note(f"{options.num_requests} requests, each alone and plainly")
    wanted = bodies(options.num_requests, options.prompts)
    known = answered(wanted, max_model_len=MAX_MODEL_LEN, max_num_seqs=4)
    note(f"{options.streams} streams for {options.minutes:g} minutes")
    run(options, known, report)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
