"""Processes that this one has started, by the script that they run. Reads ``/proc``."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

HAS_PROC = Path("/proc/self/task").is_dir()


def running(script: str) -> list[int]:
    """Those that have not ended."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            for pid in map(int, (task / "children").read_text().split()):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(script.encode()) for word in words):
                    found.append(pid)
    return found


def kill(pid: int) -> None:
    """End a process and wait until it has ended; its parent may still ask for its status."""
    os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # its parent has asked already
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def kill_once_asked(pid: int) -> None:
    """End a stopped process as soon as something was written to its standard input."""
    with open(f"/proc/{pid}/fd/0", "rb", buffering=0) as pipe:
        select.select([pipe], [], [])
    kill(pid)
