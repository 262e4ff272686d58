"""Server-sent events: their bytes, and answers that end when the client leaves or time is up.

Owns what happens to an answer besides its contents: keep-alive comments, an error in mid-stream,
the deadline, and the end of the work when the client leaves. Knows no endpoint and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_SECONDS = 15.0
_LAST_WORDS_SECONDS = 5.0

Result = TypeVar("Result")
ErrorEvent = Callable[[BaseException], bytes]


class StreamForm(NamedTuple):
    """How a stream is written; ``keep_alive`` is sent after a long silence, and means nothing."""

    media_type: str = "text/event-stream"
    keep_alive: bytes = KEEP_ALIVE


EVENTS = StreamForm()


def encode_json(value: Any) -> bytes:
    """JSON of plain values, without white space; a NaN or infinity becomes ``null``."""
    return to_json(value, inf_nan_mode="null")


def event(value: Any) -> bytes:
    """One event with a JSON document in it."""
    return b"data: " + encode_json(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One event, named by its ``type``."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\n" + event(value)


class ChoiceEvents:
    """Events of one choice each. What is the same in all of them is encoded once.

    Args:
        head: what comes before the choice.
        has_usage: whether the stream ends with an event of the usage; the others then say that
            it is not in them, unless they are given it.
    """

    def __init__(self, head: Mapping[str, Any], has_usage: bool) -> None:
        self._head, self._has_usage = head, has_usage
        self._before = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._without_usage = b"]" + (b',"usage":null' if has_usage else b"") + b"}\n\n"

    def of(
        self,
        choices: Iterable[Any],
        usage: Mapping[str, Any] | None = None,
        also: Mapping[str, Any] | None = None,
    ) -> bytes:
        """The events, each with the ``usage`` so far, and the first with what is told ``also``."""
        before, after = self._before, self._without_usage
        if usage is not None:
            after = b'],"usage":' + encode_json(usage) + b"}\n\n"
        events = [before + encode_json(choice) + after for choice in choices]
        if also and events:
            begin = b"data: {"
            events[0] = begin + encode_json(also)[1:-1] + b"," + events[0].removeprefix(begin)
        return b"".join(events)

    def end(self, usage: Mapping[str, Any]) -> bytes:
        """The end of the stream."""
        last = event({**self._head, "choices": [], "usage": usage}) if self._has_usage else b""
        return last + DONE


class ClientGoneError(Exception):
    """The client closed its connection and reads no answer."""


@dataclass(slots=True)
class Deadline:
    """When an answer must have ended; ``timeout`` is infinite where there is no limit."""

    timeout: float
    began: float
    _reason: Exception | None = None

    @classmethod
    def after(cls, timeout: float | None) -> Deadline:
        return cls(timeout or math.inf, time.monotonic())

    @property
    def seconds_left(self) -> float:
        if self._reason is not None:
            return 0.0
        return self.began + self.timeout - time.monotonic()

    def is_over(self, at: float) -> bool:
        """Whether it has come at this time."""
        return self._reason is not None or at >= self.began + self.timeout

    def end(self, reason: Exception) -> None:
        """Let it be at once, for a reason that is not the time."""
        self._reason = self._reason or reason

    def error(self) -> Exception:
        return self._reason or TimeoutError(f"the answer took longer than {self.timeout:g} s")


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, Result], deadline: Deadline
) -> Result:
    """Do the work, unless the client leaves or time is up first; then it has been cancelled.

    Raises:
        ClientGoneError: the client closed its connection.
        TimeoutError: the work was not done at the deadline, or what the deadline was ended for.
        Exception: what the work raised.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await first_of(task, gone, deadline.seconds_left)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError("the client closed its connection")
        raise deadline.error()
    finally:
        await cancelled(task, gone)


class EventStream(Response):
    """A response of events; whichever way it ends, their iterator has been closed then.

    Make it with :meth:`started`, which runs the events up to the first one, so that what is refused
    there is still an ordinary HTTP error.
    """

    def __init__(
        self,
        first: asyncio.Task[bytes],
        events: AsyncGenerator[bytes, None],
        error_event: ErrorEvent,
        deadline: Deadline,
        form: StreamForm,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=form.media_type)
        self._keep_alive = form.keep_alive
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._error_event = error_event
        self._deadline = deadline
        self._last_sent = 0.0
        self._is_sending = False

    @classmethod
    async def started(
        cls,
        events: AsyncGenerator[bytes, None],
        error_event: ErrorEvent,
        receive: Receive,
        deadline: Deadline,
        form: StreamForm = EVENTS,
        patience: float | None = None,
    ) -> EventStream:
        """Take the first events, then make the response.

        Args:
            events: bytes of zero or more whole events each, the ``[DONE]`` at the end included.
            error_event: the bytes that end the stream when the iterator raises.
            receive: of ASGI, with the body read already.
            deadline: when the stream ends with the event of its error.
            patience: seconds after which the response begins without events, and is kept alive;
                None waits for them until the deadline.

        Raises:
            ClientGoneError, TimeoutError: there were no first events before that.
            Exception: what the iterator raised before its first events.
        """

        async def first() -> bytes:
            return await anext(events)

        begun = asyncio.create_task(first())
        try:
            waiting = asyncio.wait((begun,), timeout=patience)
            await while_connected(receive, waiting, deadline)
            if begun.done():
                begun.result()
        except BaseException:
            await cancelled(begun)
            raise
        return cls(begun, events, error_event, deadline, form)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(_disconnected(receive))
        self._last_sent = time.monotonic()
        try:
            while not sender.done() and not gone.done() and self._deadline.seconds_left > 0:
                await first_of(sender, gone, self._patience())
                if not (sender.done() or gone.done()) and self._is_due:
                    await self._send(send, self._keep_alive)
            if not sender.done() and not gone.done():
                await cancelled(sender)
                await self._end_late(send)
            elif sender.done():
                sender.result()
        finally:
            await cancelled(sender, gone, self._first)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await self._send_message(send, start)
        last = b""  # goes with the end of the body: every write wakes the client
        try:
            await self._send(send, await self._first)
            async for data in self._events:
                if data.endswith(DONE):
                    last = data
                else:
                    await self._send(send, data)
        except Exception as error:
            last = self._error_event(error)
        await self._send_message(send, {"type": "http.response.body", "body": last})

    async def _end_late(self, send: Send) -> None:
        """Say that time is up, or what else ended the answer, to a client that still reads."""
        data = self._error_event(self._deadline.error())
        last = {"type": "http.response.body", "body": data}
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(send(last), _LAST_WORDS_SECONDS)

    async def _send(self, send: Send, data: bytes) -> None:
        if data:
            message = {"type": "http.response.body", "body": data, "more_body": True}
            await self._send_message(send, message)

    async def _send_message(self, send: Send, message: Message) -> None:
        """Send, and wait as long as the client is slow to take it."""
        self._is_sending = True
        await send(message)
        self._is_sending = False
        self._last_sent = time.monotonic()

    @property
    def _is_due(self) -> bool:
        """Whether a client that could take something has got nothing for too long."""
        idle = time.monotonic() - self._last_sent
        return idle >= KEEP_ALIVE_SECONDS and not self._is_sending

    def _patience(self) -> float:
        """Seconds until a sign of life or the deadline may be due."""
        idle = 0.0 if self._is_sending else time.monotonic() - self._last_sent
        return max(0.0, min(KEEP_ALIVE_SECONDS - idle, self._deadline.seconds_left))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(one: asyncio.Task[Any], other: asyncio.Task[Any], seconds: float) -> None:
    timeout = None if seconds == math.inf else max(seconds, 0.0)
    await asyncio.wait((one, other), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
