"""The one thread of a process on which models run. Owns turns, knows no engine's inside.

torch keeps a pool of OpenMP workers per thread that computes. With a second pool there are more
workers than cores, and OpenMP then puts them to sleep after every operation: a decode step of a
small model took 2.6 times as long. So every engine of a process is built and stepped here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Member(Protocol):
    """An object that gets turns on the thread, such as an engine."""

    @property
    def has_work(self) -> bool: ...

    def turn(self) -> None:
        """Do one step. Must not raise."""
        ...


class ComputeThread:
    """Runs commands, and gives members that have work a step in turn. Ends with its last member."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._members: list[Member] = []
        self._thread: threading.Thread | None = None

    def join(self, member: Member) -> None:
        """Give a member turns. Call it on the thread."""
        self._members.append(member)

    def leave(self, member: Member) -> None:
        """Call it on the thread; a member that left already is ignored."""
        if member in self._members:
            self._members.remove(member)

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the thread, between two steps, and return or raise its result."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[Result] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.post(command)
        return future.result()

    def post(self, command: Callable[[], None]) -> None:
        """Run a command, which must not raise, on the thread; do not wait for it."""
        with self._lock:
            self._commands.put(command)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="paceline-compute", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while not self._is_over():
            busy = [member for member in self._members if member.has_work]
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                for member in busy:
                    member.turn()
            else:
                command()

    def _is_over(self) -> bool:
        """Let go of the thread, and so of its workers, when it has neither work nor members."""
        with self._lock:
            if self._members or not self._commands.empty():
                return False
            self._thread = None
            return True


COMPUTE = ComputeThread()
"""Shared by every engine of the process."""
