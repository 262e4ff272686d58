"""The one thread of a process on which models run, and the engines that callers share on it.

torch keeps a pool of OpenMP workers per thread that computes. With a second pool there are more
workers than cores, and OpenMP then puts them to sleep after every operation: a decode step of a
small model took 2.6 times as long. So every engine of a process is built and stepped here.

Callers of an :class:`EngineThread` hand over functions, which run between two steps. A request's
outputs go to its sink, once per step for all requests that share one. Knows no prompts, texts or
asyncio, and no engine's inside.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from paceline.core.errors import EngineClosedError
from paceline.engine.engine import Engine
from paceline.request.request import FinishReason, StepOutput

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Sink = Callable[[Sequence[StepOutput]], None]
"""Takes what one step has for the requests that are attached to it."""


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


class EngineThread:
    """Owns an :class:`Engine` and steps it while there is work.

    Args:
        build: makes the engine; it runs on the compute thread, and its errors are raised here.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._sinks: dict[int, Sink] = {}
        self._closed: Exception | None = None
        self._engine = COMPUTE.call(lambda: self._open(build))

    def _open(self, build: Callable[[], Engine]) -> Engine:
        self._engine = build()
        COMPUTE.join(self)
        return self._engine

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run a function on the engine's thread between two steps and return its result.

        Raises:
            EngineClosedError: the engine is closed.
            Exception: whatever the function raises.
        """

        def checked() -> Result:
            if self._closed is not None:
                raise EngineClosedError("the engine is closed; create another one")
            return function(self._engine)

        return COMPUTE.call(checked)

    def attach(self, request_id: int, sink: Sink) -> None:
        """Where a request's outputs go; call it on the engine's thread when adding the request."""
        self._sinks[request_id] = sink

    def abort(self, request_ids: list[int]) -> None:
        """End requests, and tell their sinks. Does nothing when the engine is closed."""

        def command() -> None:
            for request_id in request_ids:
                self._engine.abort(request_id)

        if self._closed is None and request_ids:
            COMPUTE.post(command)

    def close(self) -> None:
        """Stop after the current step; requests in flight end with :class:`EngineClosedError`."""
        if self._closed is None:
            COMPUTE.call(lambda: self._end(EngineClosedError("the engine was closed")))

    def turn(self) -> None:
        """One step, and its outputs to their sinks. A step that raises ends the engine."""
        try:
            self._deliver(self._engine.step())
        except Exception as failure:
            log.exception("the engine failed")
            error = EngineClosedError(f"the engine failed: {failure!r}")
            error.__cause__ = failure
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._closed = self._closed or error
        COMPUTE.leave(self)
        ended = FinishReason.ERROR
        self._deliver(
            [StepOutput(i, (), (), finish_reason=ended, error=error) for i in self._sinks]
        )
        self._engine.close()

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        parcels: dict[Sink, list[StepOutput]] = {}
        for output in outputs:
            if output.finish_reason is None:
                sink = self._sinks.get(output.request_id)
            else:
                sink = self._sinks.pop(output.request_id, None)
            if sink is not None:
                parcels.setdefault(sink, []).append(output)
        for sink, parcel in parcels.items():
            try:
                sink(parcel)
            except Exception as error:
                log.warning("a reader of %d requests failed: %r", len(parcel), error)
