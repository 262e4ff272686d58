"""Servers of replicas as a user starts them, and what is asked of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

import paceline

PATIENCE = 300.0
"""Seconds for one answer, or until something happens, on a busy machine; more is a hang."""
SMALL = ("--threads", "1", "--max-model-len", "512", "--kv-cache-memory", "64M")
LONG = {"prompt": "Once", "max_tokens": 480, "stream": True, "ignore_eos": True}


def environment(**more: str) -> dict[str, str]:
    """Of a process that finds Paceline where this one does."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("PACELINE_")}
    return kept | {"PYTHONPATH": str(Path(paceline.__file__).parent.parent)} | more


def iter_until(lines: Iterable[str], words: str) -> Iterator[str]:
    """Lines up to the first one with these words, or all."""
    for line in lines:
        yield line
        if words in line:
            return


@contextmanager
def serving(
    *options: str, model: str = "embedded", code: int = 0, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server and a client of it; it must end by itself when it is told to, or before."""
    serve = ("serve", model, "--port", "0")
    command = [sys.executable, "-m", "paceline", *serve, *SMALL, *options]
    process = subprocess.Popen(
        command, env=environment(**variables), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        *before, line = iter_until(process.stderr, "paceline serves ")
        assert line.startswith("paceline serves "), "".join([*before, line])
        with ThreadPoolExecutor(1) as reader:
            reader.submit(process.stderr.read)
            url = line.split(" at ")[1].split()[0]
            try:
                with httpx.Client(base_url=url, timeout=PATIENCE) as client:
                    yield process, client
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == code
            finally:
                process.kill()  # or the reader would wait for what a failed test leaves behind
    finally:
        process.kill()


def by_replica(client: httpx.Client, name: str, **labels: str) -> dict[str, float]:
    """Values of a metric by the replica's number; of a server without replicas under no name."""
    page = client.get("/metrics").text
    lines = (line for line in page.splitlines() if line.startswith(f"paceline:{name}{{"))
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return {
        line.partition('replica="')[2].partition('"')[0]: float(line.rpartition(" ")[2])
        for line in lines
        if all(each in line for each in wanted)
    }


def comes_true(condition: Callable[[], object]) -> bool:
    """Whether something happens within :data:`PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def until(condition: Callable[[], object]) -> None:
    assert comes_true(condition)


def descendants(ancestor: int, words: str) -> list[int]:
    """Processes below this one with these words in their name or command, the youngest last."""
    table = subprocess.run(["ps", "-wweo", "pid,ppid,comm,args"], capture_output=True, text=True)
    rows = [line.split(None, 2) for line in table.stdout.splitlines()[1:]]
    own = {ancestor}
    for _ in rows:
        own |= {int(pid) for pid, parent, _ in rows if int(parent) in own}
    return [int(pid) for pid, _, args in rows if words in args and int(pid) in own]


def replicas_of(ancestor: int) -> list[int]:
    """Processes of Serve's engines below this one."""
    return descendants(ancestor, "ServeReplica:paceline:engine")
