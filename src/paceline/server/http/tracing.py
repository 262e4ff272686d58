"""Names by which a request is found again: ``x-request-id``, and OpenTelemetry's trace in the logs.

Owns the headers' formats and the shape of a log line. A client's own request id is sent back if it
is short and plain; every other request gets one. The trace id of a ``traceparent`` header (W3C
Trace Context) goes to both processes' logs. Knows no exporter.
"""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # the engine's process logs by this module, and knows no framework
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
_REQUEST_ID_KEY = REQUEST_ID.encode()
LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s%(trace)s"
_PLAIN = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
_request_id: ContextVar[str] = ContextVar("request_id", default="")
_trace_id: ContextVar[str] = ContextVar("trace_id", default="")


def parse_traceparent(header: str) -> str:
    """The trace id in a ``traceparent`` header, 32 hexadecimal digits; empty if it is malformed."""
    match = _TRACEPARENT.fullmatch(header.strip())
    return match[1] if match else ""


def current_request_id() -> str:
    """Of the request that is being handled; empty where there is none."""
    return _request_id.get()


def current_trace_id() -> str:
    """The trace of the request that is being handled; empty where it has none."""
    return _trace_id.get()


class TraceMiddleware:
    """ASGI middleware: every answer carries the id of its request, and log lines its trace id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given, traceparent = _named_headers(scope)
        name = given if _PLAIN.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        # Each request has a context of its own. It is not left as it was: whoever answers when the
        # application has failed asks for the id after this has ended.
        _request_id.set(name)
        _trace_id.set(parse_traceparent(traceparent) if traceparent else "")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                others = [pair for pair in headers if pair[0] != _REQUEST_ID_KEY]
                message["headers"] = [*others, (_REQUEST_ID_KEY, name.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _named_headers(scope: Scope) -> tuple[str, str]:
    """The first request id and the first trace of a request, empty where it has none."""
    request_id = traceparent = b""
    for key, value in scope["headers"]:
        if key == _REQUEST_ID_KEY:
            request_id = request_id or value
        elif key == b"traceparent":
            traceparent = traceparent or value
    return request_id.decode("latin-1"), traceparent.decode("latin-1")


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
