"""Answers in one body, however large. They count as waiting until their clients have taken them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.core.errors import PacelineError
from paceline.server.engine_process.backlog import Backlog
from paceline.server.hosting.models import Models
from paceline.server.http.sse import cancelled, encode_json

log = logging.getLogger(__name__)

PART = 64 << 10
"""Bytes that are sent at once; a connection holds a few such parts of what its client leaves."""


class WholeAnswer(Response):
    """A body of JSON that goes out as fast as its client takes it.

    Where too much waits for all clients, and most of it for this one, the body ends too soon and
    its connection is closed.
    """

    def __init__(
        self, body: bytes, backlog: Backlog, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(body, headers=headers, media_type="application/json")
        self._backlog = backlog

    @classmethod
    def of(
        cls, request: Request, document: Any, headers: Mapping[str, str] | None = None
    ) -> WholeAnswer:
        return cls(encode_json(document), Models.of(request).backlog, headers)

    @classmethod
    def of_json(cls, request: Request, body: bytes) -> WholeAnswer:
        return cls(body, Models.of(request).backlog)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= PART:
            await super().__call__(scope, receive, send)
            return
        sender = asyncio.create_task(self._send_in_parts(send))

        def dropped(error: PacelineError) -> None:
            log.warning("an answer is cut off while it is sent: %s", error)
            sender.cancel()

        share = self._backlog.of_body(len(self.body), dropped)
        try:
            await asyncio.wait((sender,))
            if not sender.cancelled():
                sender.result()
        finally:
            await cancelled(sender)
            share.close()

    async def _send_in_parts(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        size = len(self.body)
        for begin in range(0, size, PART):
            end = begin + PART
            part = bytes(self.body[begin:end])
            await send({"type": "http.response.body", "body": part, "more_body": end < size})
