"""Bodies of requests, read and checked, and answers in one body, however large.

Answers count as waiting until their clients have taken them. Knows no endpoint; how large the body
of a request may be is :mod:`paceline.server.http.security`'s.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.core.errors import PacelineError
from paceline.server.engine_process.backlog import Backlog
from paceline.server.http.errors import ApiError
from paceline.server.http.sse import ClientGoneError, cancelled, encode_json
from paceline.server.protocol.generation import ApiModel

_LARGE_NUMBER = re.compile(rb"[eE]\+?\d{2}|(?<!\d)\d{200}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
CURLS = "application/x-www-form-urlencoded"
log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=ApiModel)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The request's body as a model.

    Raises:
        ApiError: 415, its type is not JSON's. No type, and the one that curl and wget write by
            default, are taken unless a page sends them, which a browser's ``Origin`` tells: they
            are what pages of other origins can send without asking.
        ApiError: 400, it is not valid JSON, or nests deeper than 200 levels, or a number overflows.
        ValidationError: it is not what the model says.
        ClientGoneError: the client left before all of it had arrived.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_of_page = "origin" in request.headers
    if media_type != "application/json" and (is_of_page or media_type not in ("", CURLS)):
        given = media_type[:60] or "not given"
        raise ApiError(415, f"the body's type is {given}; it must be application/json")
    try:
        raw = await request.body()
    except ClientDisconnect as error:
        raise ClientGoneError("the client left before its request was complete") from error
    value = _parsed(raw)
    ignored: set[str] = set()
    body = model.model_validate(value, context=ignored)
    if ignored:
        log.debug("ignored unknown keys inside a body: %s", ", ".join(sorted(ignored)))
    return body


def _parsed(raw: bytes) -> Any:
    """The JSON value of a body; ``ApiError`` 400 where it, a number or a character is none."""
    try:
        value: Any = from_json(raw, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        half = " (half of a surrogate pair is no character)" if _has_half_pair(raw, error) else ""
        raise _invalid(f"{error}{half}") from error
    # The parser reads 1e999 as infinity. Only such numbers make it worth looking for one.
    if _LARGE_NUMBER.search(raw) and not _is_finite(value):
        raise _invalid(f"a number is beyond what a double holds, {sys.float_info.max:.4g}")
    return value


def _has_half_pair(raw: bytes, error: ValueError) -> bool:
    return "hex escape" in str(error) and _SURROGATE.search(raw) is not None


def _is_finite(value: Any) -> bool:
    """Whether no number in a JSON value, at whatever depth, is infinite."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
        elif isinstance(value, float) and math.isinf(value):
            return False
    return True


def _invalid(problem: str) -> ApiError:
    return ApiError(400, f"the body is no valid JSON: {problem}", code="invalid_json")


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
        return cls(encode_json(document), request.app.state.models.backlog, headers)

    @classmethod
    def of_json(cls, request: Request, body: bytes) -> WholeAnswer:
        return cls(body, request.app.state.models.backlog)

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
