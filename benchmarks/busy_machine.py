"""Decoding beside other programs: tokens per second while k endless loops occupy the machine.

For each k Paceline with all threads and with one take turns; llama.cpp with all threads follows on
the same file, where ``make peers`` has installed it. Each loop is a process of its own. A team of
threads that waits for a member without a core is slower than one thread, and now and then far
slower than usual; both are counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from harness import (
    Report,
    Row,
    Sample,
    Target,
    arguments,
    chosen,
    grid,
    markdown,
    note,
    numbers,
    take_turns,
)
from peers_client import Engine, MissingPeerError, Worker

from paceline.api.llm import embedded_model

LOOP = "while True: pass"
PROMPT = list(range(100, 132))
TARGET = 0.9
ALONE, TEAM, PEER = "1 thread", "all threads", "llama.cpp"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """As many processes that compute without end."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def workers(model: str, threads: int, stack: ExitStack) -> dict[str, Worker]:
    """By the name of an arm; llama.cpp is left out where it cannot read the model."""
    files = {"model": model, "dtype": "auto"}
    own = Engine("paceline", "peers_paceline.py", "", (), None, lambda _: files)
    peer = Engine("llama.cpp", "peers_llama.py", "", (), "llama", lambda _: files)
    found = {}
    for arm, engine, count in ((TEAM, own, threads), (ALONE, own, 1), (PEER, peer, threads)):
        try:
            found[arm] = Worker(engine, model, count)
        except MissingPeerError as error:
            if engine is own:
                raise
            note(f"{arm}: left out: {error}")
            continue
        stack.callback(found[arm].close)
    return found


def measure(options: argparse.Namespace, arms: dict[str, Worker]) -> dict[int, list[Sample]]:
    """The samples of each number of loops."""
    request = {"mode": "plain", "prompt": {"token_ids": PROMPT}, "max_tokens": options.max_tokens}
    runs = {name: lambda _, own=own: own.ask("generate", **request) for name, own in arms.items()}
    for run in runs.values():
        run(None)  # pages in the weights
    peer = {arm: runs.pop(arm) for arm in [PEER] if arm in runs}
    found: dict[int, list[Sample]] = {}
    for count in options.loops:
        with busy_loops(count):
            for turns, repeats in ((runs, options.repeats), (peer, options.peer_repeats)):
                samples = take_turns(turns, [f"{count} loops"], repeats, tokens)
                found.setdefault(count, []).extend(samples)
        note(f"{count} loops done")
    return found


def tokens(output: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": output["tokens"]}


def speeds(samples: Sequence[Sample], arm: str) -> list[float]:
    """Tokens per second of each run of an arm."""
    return [s.facts["tokens"] / s.seconds for s in samples if s.arm == arm and s.seconds]


def row(count: int, arm: str, own: Sequence[float], alone: Sequence[float]) -> dict[str, Any]:
    """An arm's speeds at a number of loops, beside those of one thread."""
    middle = median(own)
    found = {"loops": count, "arm": arm, "tokens_per_second": middle}
    found["over_one_thread"] = middle / median(alone)
    return {**found, "slowest_over_median": min(own) / middle}


def rows(found: dict[int, list[Sample]], arms: Sequence[str]) -> list[dict[str, Any]]:
    return [
        row(count, arm, own, speeds(samples, ALONE))
        for count, samples in found.items()
        for arm in arms
        if (own := speeds(samples, arm))
    ]


def targets(results: Sequence[Row]) -> list[Target]:
    team = {row["loops"]: row["over_one_thread"] for row in results if row["arm"] == TEAM}
    return [
        Target(f"all threads over one, {loops} loops", value, TARGET, "at least")
        for loops, value in team.items()
    ]


def tables(results: Sequence[Row]) -> list[str]:
    """A line per number of loops and arm."""
    columns = (
        ("loops", "loops"),
        ("arm", "arm"),
        ("tok/s", "tokens_per_second", 0),
        ("over 1 thread", "over_one_thread", 2),
        ("slowest run over median", "slowest_over_median", 2),
    )
    return [markdown(*grid(results, *columns))]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", default=None, help="GGUF file or folder (default: embedded)")
    parser.add_argument("--name", help="of the results: busy_machine-NAME")
    parser.add_argument("--loops", type=numbers, default=[0, 1, 2, 4], help="default: 0,1,2,4")
    parser.sized("--repeats", 20, 5, "runs of each arm")
    parser.add_argument("--peer-repeats", type=int, default=2, help="of llama.cpp (default: 2)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.model and options.save and not options.name:
        parser.error("--save of another model needs --name")
    model = options.model or embedded_model("target")
    with ExitStack() as stack:
        arms = workers(model, options.threads, stack)
        found = measure(options, arms)
    config = {
        "model": os.path.basename(model),
        **chosen(options, "threads", "max_tokens", "repeats"),
    }
    name = f"busy_machine-{options.name}" if options.name else "busy_machine"
    report = Report(name, config, [each for samples in found.values() for each in samples])
    report.results = rows(found, list(arms))
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    raise SystemExit(main())
