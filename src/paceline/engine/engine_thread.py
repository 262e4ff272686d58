"""Lets many callers share one engine, which runs in a thread of its own.

Whatever happens to the engine happens on that thread, between two steps: callers hand over
functions. Outputs go to one sink per request. Knows no prompts, texts or asyncio.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from paceline.engine.engine import Engine
from paceline.errors import EngineClosedError
from paceline.request import FinishReason, StepOutput

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Sink = Callable[[StepOutput], None]
Command = Callable[[], None]


class EngineThread:
    """Owns an :class:`Engine` and steps it while there is work."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run a function on the engine's thread between two steps and return its result.

        Raises:
            EngineClosedError: the engine is closed.
            Exception: whatever the function raises.
        """
        future: Future[Result] = Future()

        def command() -> None:
            try:
                future.set_result(function(self._engine))
            except BaseException as error:
                future.set_exception(error)

        self._send(command)
        while True:
            try:
                return future.result(timeout=0.5)
            except TimeoutError:
                if not self._thread.is_alive() and not future.done():
                    raise EngineClosedError("the engine closed before it answered") from None

    def _send(self, command: Command) -> None:
        if self._closed.is_set():
            raise EngineClosedError("the engine is closed; create another one")
        self._commands.put(command)

    def attach(self, request_id: int, sink: Sink) -> None:
        """Where a request's outputs go; call it on the engine's thread when adding the request."""
        self._sinks[request_id] = sink

    def abort(self, request_ids: list[int]) -> None:
        """End requests; their sinks hear of it."""

        def command() -> None:
            for request_id in request_ids:
                self._engine.abort(request_id)

        self._send(command)

    def close(self) -> None:
        """Stop after the current step; requests in flight end with :class:`EngineClosedError`."""
        if not self._closed.is_set():
            self._closed.set()
            self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        error: Exception = EngineClosedError("the engine was closed")
        try:
            while self._take_commands():
                for output in self._engine.step():
                    self._deliver(output)
        except Exception as failure:
            log.exception("the engine failed")
            error = EngineClosedError(f"the engine failed: {failure!r}")
            error.__cause__ = failure
        finally:
            self._closed.set()
            for request_id in list(self._sinks):
                self._deliver(
                    StepOutput(request_id, (), (), finish_reason=FinishReason.ERROR, error=error)
                )

    def _take_commands(self) -> bool:
        """Run what is queued, waiting when there is nothing else to do; False to stop."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _deliver(self, output: StepOutput) -> None:
        if output.finish_reason is None:
            sink = self._sinks.get(output.request_id)
        else:
            sink = self._sinks.pop(output.request_id, None)
        if sink is None:
            return
        try:
            sink(output)
        except Exception as error:
            log.warning("a reader of request %d failed: %r", output.request_id, error)
