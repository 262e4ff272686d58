"""OpenTelemetry trace ids in log lines: from the header ``traceparent`` to both processes' logs.

Owns the header's format (W3C Trace Context) and the shape of a log line. Knows no exporter: spans
are the collector's in front of the server; lines that carry its trace id can be found from there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

HEADER = b"traceparent"
LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s%(trace)s"
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
_trace_id: ContextVar[str] = ContextVar("trace_id", default="")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


def parse_traceparent(header: str) -> str:
    """The trace id in a ``traceparent`` header, 32 hexadecimal digits; empty if it is malformed."""
    match = _TRACEPARENT.fullmatch(header.strip())
    return match[1] if match else ""


def current_trace_id() -> str:
    """The trace of the request that is being handled; empty where it has none."""
    return _trace_id.get()


@contextmanager
def traced(trace_id: str) -> Iterator[None]:
    """Lines that are logged in this block carry the trace id, unless it is empty."""
    token = _trace_id.set(trace_id)
    try:
        yield
    finally:
        _trace_id.reset(token)


class TraceMiddleware:
    """ASGI middleware: lines that are logged while a request is handled carry its trace id."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        value = next((value for name, value in headers if name == HEADER), b"")
        with traced(parse_traceparent(value.decode("latin-1"))):
            await self._app(scope, receive, send)


class _TraceFilter(logging.Filter):
    """Gives every record what :data:`LINE` ends with. It never holds a record back.

    The trace is the record's own (``extra={"trace_id": ...}``) or the current one.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        trace_id = getattr(record, "trace_id", "") or _trace_id.get()
        record.trace = f" trace_id={trace_id}" if trace_id else ""
        return True


def install_trace_logging(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Log this process to a stream (standard error by default), with trace ids."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(_TraceFilter())
    handler.setFormatter(logging.Formatter(LINE))
    logging.basicConfig(level=level, handlers=[handler], force=True)
