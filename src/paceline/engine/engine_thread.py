"""Lets many callers share one engine, which lives on the process's compute thread.

The engine is used on that thread only, between two steps: callers hand over functions. A request's
outputs go to its sink, once per step for all requests that share one. Knows no prompts, texts or
asyncio.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from paceline.core.errors import EngineClosedError
from paceline.engine.compute_thread import COMPUTE
from paceline.engine.engine import Engine
from paceline.request.request import FinishReason, StepOutput

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Sink = Callable[[Sequence[StepOutput]], None]
"""Takes what one step has for the requests that are attached to it."""


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
