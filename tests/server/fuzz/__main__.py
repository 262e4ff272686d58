"""Sends generated requests to a server as a user starts it, and judges its answers and its health.

    python -m tests.server.fuzz --count 20000 --seed 0

Requests go out one after the other, so that each time is that request's own. One that took too
long is sent again, and its least time counts, less what its processes waited for a processor,
because other work of the machine can only add to it. Ends with one JSON line. The exit code is 1
when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tests.server.fuzz.cases import cases
from tests.server.fuzz.judge import SLOW_SECONDS, Answer, problems, seconds_for_tokens
from tests.server.fuzz.requests import CONTEXT, KEY, MAX_BODY_BYTES, Case
from tests.server.fuzz.server import (
    Address,
    Stalled,
    files_of,
    memory_of,
    problems_of_health,
    scheduled,
    send,
    warm_up,
)
from tests.server.fuzz.values import NAME
from tests.server.served import chat_model
from tests.server.test_serve import started

REPEATS = 4
MAX_GROWTH = 0.05
MAX_SHOWN = 40
MAX_SLOWEST = 12
OPTIONS = ("--served-model-name", NAME, "--api-key", KEY, "--max-body-size", str(MAX_BODY_BYTES))
# So few that they are soon full: answers are kept on purpose, and a leak must not hide there.
SUFFIXES = {"method": "suffix", "suffix_decoding_max_cached_tokens": 10_000}
OPTIONS += ("--speculative-config", json.dumps([SUFFIXES]))
OPTIONS += ("--max-model-len", str(CONTEXT), "--kv-cache-memory", "32M", "--threads", "1")


@dataclass
class Report:
    """What a run found.

    Attributes:
        failures: each with the number of its case.
        slowest: seconds beyond those for tokens, and names; longest first.
    """

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)

    def take(self, number: int, case: Case, answer: Answer, seconds: float) -> None:
        self.sent += 1
        self.statuses[answer.status] += 1
        beyond = round(seconds - seconds_for_tokens(answer), 3)
        self.slowest = sorted([*self.slowest, (beyond, case.name)], reverse=True)[:MAX_SLOWEST]
        found = list(problems(case, answer))
        if beyond > SLOW_SECONDS:
            found.append(f"took {seconds:.2f} s at best: {answer.status} {answer.body[:200]!r}")
        for problem in found:
            self.fail(f"case {number} ({case.path[:40]} {case.name}): {problem}")
            data = case.raw or case.body
            note(f"    sent {len(data)} bytes: {data[:300]!r}")

    def fail(self, problem: str) -> None:
        self.failures.append(problem[:500])
        note(f"wrong: {problem}")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_case(address: Address, pid: int, case: Case) -> tuple[Answer, float]:
    """Send a request, and again if it was slow; then the least of its seconds."""
    answer, seconds = send(address, case)
    for _ in range(REPEATS):
        if seconds <= SLOW_SECONDS + seconds_for_tokens(answer):
            break
        time.sleep(0.2)
        before = scheduled(pid)
        answer, wall = send(address, case)
        ran, waited = (b - a for a, b in zip(before, scheduled(pid), strict=True))
        # Where others want the processor as well, only the share of the time that was had counts.
        share = ran / (ran + waited) if ran > 0 and waited > 0 else 1.0
        seconds = min(seconds, wall * share)
    return answer, seconds


def check_memory(report: Report) -> None:
    """What large bodies need comes and goes; the least of each third of a run is what stays.

    The first third does not count: what is bounded, such as caches of grammars, is being filled.
    """
    third = len(report.memory) // 3
    for name in ("server", "paceline-engine"):
        begin = min(each[name] for each in report.memory[-2 * third : -third])
        end = min(each[name] for each in report.memory[-third:])
        if end > (1 + MAX_GROWTH) * begin:
            report.fail(f"the memory of {name} grew from {begin} to {end} kB")


def check_files(report: Report, before: dict[str, int], pid: int) -> None:
    """Whether all files are closed that were opened for requests; connections close soon."""
    for _ in range(100):
        report.files = files_of(pid)
        left = {n: report.files[n] - before[n] for n in ("server", "paceline-engine")}
        if max(left.values()) <= 0:
            return
        time.sleep(0.1)
    report.fail(f"files that are open beyond those at the start: {left}")


def run(count: int, seed: int, first: int = 0) -> Report:
    """Send the cases from ``first`` up to ``count`` of a seed to a fresh server."""
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        model = chat_model(Path(name))
        with started(str(model), *OPTIONS) as (process, url):
            host, port = urlsplit(url).hostname, urlsplit(url).port
            assert host is not None
            assert port is not None
            address = (host, port)
            warm_up(address)
            files = files_of(process.pid)
            stalled = Stalled(address, 40)
            marks = {first + (count - first) * i // 10 for i in range(1, 10)}
            for number, case in enumerate(cases(seed, count, first), first):
                report.take(number, case, *run_case(address, process.pid, case))
                if number in marks:
                    report.memory.append(memory_of(process.pid))
                    note(f"{number} sent, {dict(report.statuses)}, {report.memory[-1]}")
            for problem in (*stalled.problems(), *problems_of_health(address)):
                report.fail(problem)
            report.memory.append(memory_of(process.pid))
            check_memory(report)
            check_files(report, files, process.pid)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    report = run(options.count, options.seed, options.first)
    found = {
        "sent": report.sent,
        "seconds": round(time.perf_counter() - began),
        "load_average": os.getloadavg()[0],
        "statuses": dict(sorted(report.statuses.items())),
        "slowest": report.slowest,
        "memory_kb": report.memory,
        "open_files": report.files,
        "failures": report.failures[:MAX_SHOWN],
        "num_failures": len(report.failures),
    }
    print(json.dumps(found))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
