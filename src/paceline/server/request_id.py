"""The header ``x-request-id``: a name for a request that its client and the server's log share.

Owns the header's format. A client's own id is sent back if it is short and plain; every other
request gets one.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_PLAIN = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_current: ContextVar[str] = ContextVar("request_id", default="")


def current_request_id() -> str:
    """Of the request that is being handled; empty where there is none."""
    return _current.get()


class RequestIdMiddleware:
    """ASGI middleware: every answer carries the id of its request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        name = given if _PLAIN.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        # Each request has a context of its own. It is not left as it was: whoever answers when the
        # application has failed asks for the id after this has ended.
        _current.set(name)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        await self._app(scope, receive, send_with_id)
