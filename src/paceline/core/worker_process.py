"""Processes that do for this one what nothing inside it could bound: time and memory of a call.

Owns the process, its deadline and its replacement. Knows nothing of what is asked: questions and
answers are JSON objects, one a line. What runs in the process is
:mod:`paceline.core.worker_program`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("worker_program.py")
_START_SECONDS = 60.0  # a cold disk on a busy machine
_MAX_REPLY_BYTES = 16 << 20  # a rendered template with every character escaped
_OUT_OF_TIME = {-getattr(signal, name, 0) for name in ("SIGPROF", "SIGXCPU")} - {0}
"""Exit statuses of a process whose own timer of processor time has ended it."""


class _WorkerProcess:
    """One process and the deadline of what it is asked."""

    def __init__(self, script: Path, greeting: str) -> None:
        # By path and without its folder on the import path: it needs nothing of ours.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.expired = False
        self.has_started = bool(self._exchange(greeting.encode(), _START_SECONDS).get("ready"))
        if not self.has_started:
            self.stop()

    @property
    def is_usable(self) -> bool:
        return self.has_started and self._process.poll() is None and not self.expired

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """Send a request and wait for the answer; :attr:`is_usable` says if another may follow."""
        if not self.has_started:
            return {"error": "its process did not start", "retry": True, "late": self.expired}
        reply = self._exchange(line.encode(), seconds)
        if reply:
            return reply
        self.stop()
        return {"error": self._end(seconds), "retry": True, "late": self.expired}

    def _end(self, seconds: float) -> str:
        """Why the process, which is no more, did not answer."""
        if self.expired:
            return f"it took longer than {seconds:g} s"
        if self._process.returncode in _OUT_OF_TIME:
            return "it took too much processor time"
        return "its process ended"

    def _exchange(self, data: bytes, seconds: float) -> dict[str, Any]:
        """One round trip; empty when the process was killed or broke the protocol."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
            reply = json.loads(self._process.stdout.readline(_MAX_REPLY_BYTES))
        except (OSError, ValueError):
            return {}
        finally:
            timer.cancel()
        return reply if isinstance(reply, dict) else {}

    def _expire(self) -> None:
        self.expired = True
        self._process.kill()

    def stop(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # unsent data has nowhere to go
                    stream.close()
        self._process.wait()


class WorkerSlot:
    """The worker of a script, started by the first question at the latest, replaced when killed.

    Safe to use from several threads; they take turns.

    Args:
        script: what ``core/worker_program.py`` runs; it imports nothing of Paceline.
        greeting: a line of JSON for each new process, which is ready once it has read it.
    """

    def __init__(self, script: Path, greeting: str = "{}\n") -> None:
        self._script = script
        self._greeting = greeting
        self._lock = threading.Lock()
        self._worker: _WorkerProcess | None = None

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """The answer to a line, or ``{"error": why, "retry": True}`` when there is none in time.

        ``retry`` says that this is no answer to the line: another try may bring one. Then ``late``
        says whether the time was over, and the process had not used up its own processor time.
        """
        with self._lock:
            return self._usable().ask(line, seconds)

    def start(self) -> None:
        """Start the worker before it is needed. Whoever asks meanwhile waits for it."""
        with self._lock:
            self._usable()

    def _usable(self) -> _WorkerProcess:
        if self._worker is not None and not self._worker.is_usable:
            self._worker.stop()
            self._worker = None
        if self._worker is None:
            self._worker = _WorkerProcess(self._script, self._greeting)
        return self._worker

    def close(self) -> None:
        with self._lock:
            if self._worker is not None:
                self._worker.stop()
                self._worker = None

    def forget(self) -> None:
        """Leave worker and lock, which may be held, to the process that this was forked off."""
        self._lock = threading.Lock()
        self._worker = None
