"""A server under test as a process of its own, and what the system says of it and its engine.

Knows no request: who asks the server is another's business.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT

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
