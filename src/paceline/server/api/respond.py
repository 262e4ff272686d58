"""How an answer leaves: in one body, or as a stream of events. Knows not what it says."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from paceline.server.errors import error_event
from paceline.server.sse import Deadline, EventStream, encode_json, while_connected


class Answerable(Protocol):
    """A request that was understood, and can be served in either form."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the answer, once it has begun."""
        ...

    async def document(self, request: Request) -> dict[str, Any]: ...

    def events(self, request: Request) -> AsyncGenerator[bytes, None]: ...


async def respond(
    request: Request, asked: Answerable, streams: bool | None, deadline: Deadline
) -> Response:
    """Serve it, unless the client leaves or time is up first."""
    if streams:
        events = asked.events(request)
        stream = await EventStream.started(events, error_event, request.receive, deadline)
        stream.headers.update(asked.headers)
        return stream
    document = await while_connected(request.receive, asked.document(request), deadline)
    return Response(encode_json(document), headers=asked.headers, media_type="application/json")
