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
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from harness import arguments, note
from load_client import MANNERS, Connection, ask
from load_requests import Known, answered, bodies
from load_watch import ENGINE, HTTP, Reading, ServerProcess, growth, plain
from prompt_sets import SOURCES
from report import Report, Target, number, table

from paceline.engine.default_drafts import default_speculative_config

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
        for config in default_speculative_config(None)
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
    report.samples = [*map(plain, readings), *load.failures, *({"error": a} for a in alarms)]
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


def targets(load: Load, results: Sequence[dict[str, Any]]) -> list[Target]:
    found = [
        Target("answers that were lost, mixed up or wrong", len(load.failures), 0),
        Target("whole answers", load.done["whole"] + load.done["slow"], 1, "at least"),
    ]
    for row in results[1:]:
        found.append(
            Target(f"growth of the {row['process']} after warm-up", row.get("growth"), GROWTH)
        )
    return found


def leftovers(
    stats: dict[str, Any], before: Sequence[Reading], after: Sequence[Reading]
) -> list[Target]:
    found = [
        Target("KV blocks in use at the end", stats["kv"]["used"], 0),
        Target("engine restarts", stats["restarts"], 0),
    ]
    for old, new in zip(before, after, strict=True):
        found.append(Target(f"files left open, {old.process}", new.files - old.files, 0))
    return found


def tables(results: Sequence[dict[str, Any]]) -> list[str]:
    requests, *memory = results
    done = [[manner, count] for manner, count in requests["done"].items()]
    rows = [
        [
            row["process"],
            *(
                number(row[name] / MEGABYTE, 1) if name in row else "-"
                for name in ("resident_at_start", "resident_after_warm_up", "resident_at_end")
            ),
            row.get("error") or f"{row['growth']:+.2%}",
            row.get("most_files", "-"),
        ]
        for row in memory
    ]
    names = ("preemptions", "steps", "emitted", "draft_tokens", "accepted")
    return [
        table(["clients that", "requests"], done),
        table(names, [[requests[name] for name in names]]),
        table(["memory", "start MB", "warm MB", "end MB", "growth", "most files"], rows),
    ]


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--minutes", type=float, help="of load (default: 10, quick: 1)")
    parser.add_argument("--streams", type=int, default=64, help="clients at once")
    parser.add_argument("--num-requests", type=int, help="distinct ones (default: 96, quick: 32)")
    parser.add_argument(
        "--planner",
        choices=("auto", "fixed"),
        default="fixed",
        help="fixed drafts also where it does not pay, so that every step has something to undo",
    )
    options = parser.parse_args(argv)
    options.minutes = options.minutes or (1.0 if options.quick else 10.0)
    options.num_requests = options.num_requests or (32 if options.quick else 96)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    settings = ("quick", "prompts", "minutes", "streams", "num_requests", "planner")
    report = Report("load_server", {name: getattr(options, name) for name in settings})
    note(f"{options.num_requests} requests, each alone and plainly")
    wanted = bodies(options.num_requests, options.prompts)
    known = answered(wanted, max_model_len=MAX_MODEL_LEN, max_num_seqs=4)
    note(f"{options.streams} streams for {options.minutes:g} minutes")
    run(options, known, report)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
