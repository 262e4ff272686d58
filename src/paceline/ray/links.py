"""Requests from the ingress to the replicas, past Ray, and how answers end whose replica is gone.

Owns HTTP/1.1 as a client, and the token that a request to a replica needs: the replica makes it up,
and Serve gives it to processes of the cluster. Knows no Ray.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

import httptools
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.anthropic import messages as anthropic
from paceline.server.http.errors import error_event, is_anthropic, is_ollama, to_api_error
from paceline.server.http.sse import encode_json, event

KEEP_ALIVE_SECONDS = 24 * 60 * 60
"""A replica keeps a connection that is not used, so that one which breaks tells of a death."""
CONNECT_SECONDS = 5.0
"""A machine that is gone refuses no connection."""
RANK = b"x-paceline-replica"
"""Header of each answer: the number of the replica."""
_TOKEN = b"x-paceline-token"
_READ_BYTES = 1 << 16
_PROBES = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds and a count after which a machine that is gone is noticed."""


class Address(NamedTuple):
    """Where a replica listens, and the token that it asks for."""

    host: str
    port: int
    token: str


addresses: dict[str, dict[str, Address]] = {}
"""For each application those of its running replicas by their names, as Serve has told them."""


class Gate:
    """ASGI middleware of a replica: refuses who does not know its token, and says its number."""

    def __init__(self, app: ASGIApp, token: str, rank: Callable[[], str]) -> None:
        self._app, self._token, self._rank = app, token.encode(), rank

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        brought = dict(scope["headers"]).get(_TOKEN, b"")
        if not hmac.compare_digest(brought, self._token):
            await Response(status_code=403)(scope, receive, send)
            return

        async def send_with_rank(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (RANK, self._rank().encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_rank)


class Links:
    """Connections, each of which is kept for the next request to the same replica."""

    def __init__(self) -> None:
        self._idle = defaultdict[Address, list[_Link]](list)

    async def answer(
        self, address: Address, call: ReplicaCall, headers: tuple[Header, ...] = ()
    ) -> AsyncGenerator[list[Message], None]:
        """What a replica answers, as ASGI messages: what has come together, and an error whole.

        Closing the generator tells the replica that the client has left.

        Args:
            headers: sent besides those of the call.

        Raises:
            OSError: the replica cannot be reached, or is gone before its answer has ended.
        """
        idle = self._idle[address]
        link = idle.pop() if idle else await _Link.to(address)
        reply = _Reply(call.method)
        try:
            link.writer.write(call.encoded((*headers, (_TOKEN, address.token.encode()))))
            while not reply.is_complete:
                if messages := reply.parts(await link.reader.read(_READ_BYTES)):
                    yield messages
        finally:
            if reply.can_go_on:
                idle.append(link)
            else:
                link.writer.close()

    def keep(self, addresses: Iterable[Address]) -> None:
        """Forget the connections to replicas at other addresses."""
        for gone in self._idle.keys() - set(addresses):
            for link in self._idle.pop(gone):
                link.writer.close()


class _Link(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def to(cls, address: Address) -> _Link:
        async with asyncio.timeout(CONNECT_SECONDS):
            link = cls(*await asyncio.open_connection(address.host, address.port))
        connection = link.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return link


class _Reply:
    """An answer as it comes; the parser calls what begins with ``on_``.

    Attributes:
        can_go_on: it is complete, and the connection can carry another one.
    """

    def __init__(self, method: str) -> None:
        self.is_complete = self.can_go_on = False
        self._is_head = method == "HEAD"  # the parser would wait for the body that is told of
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[Header] = []
        self._start: Message | None = None
        self._status = 0
        self._body: list[bytes] = []

    def parts(self, data: bytes) -> list[Message]:
        """What can be passed on after these bytes, which may be nothing yet."""
        if not data:
            raise ConnectionResetError("the replica is gone")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionError(f"the replica does not answer in HTTP: {error}") from error
        if self._status >= 400 and not self.is_complete:
            return []
        messages = [self._start] if self._start is not None else []
        self._start = None
        if self._body or self.is_complete:
            body, more = b"".join(self._body), not self.is_complete
            messages.append({"type": "http.response.body", "body": body, "more_body": more})
            self._body.clear()
        return messages

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._status = status = self._parser.get_status_code()
        headers = [each for each in self._headers if each[0] != b"transfer-encoding"]
        self._start = {"type": "http.response.start", "status": status, "headers": headers}
        self.is_complete = self._is_head

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self.can_go_on = self._parser.should_keep_alive() and not self._is_head
        self.is_complete = True


Header = tuple[bytes, bytes]
_OF_THE_CONNECTION = frozenset(
    b"connection content-length expect keep-alive te trailer transfer-encoding upgrade".split()
)
"""Headers that say how one connection carries a request, and not what is asked."""


@dataclass(frozen=True)
class ReplicaCall:
    """A request whose body has been read.

    Attributes:
        path: below the one that the application is mounted at.
        target: the path and the query as they were sent.
        headers: without those of the client's connection.
    """

    method: str
    path: str
    target: bytes
    headers: tuple[Header, ...]
    body: bytes

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> ReplicaCall:
        """Of an ASGI scope of HTTP."""
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root)
        target = (scope.get("raw_path") or quote(scope["path"]).encode()).removeprefix(
            quote(root).encode()
        )
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        kept = (each for each in scope["headers"] if each[0] not in _OF_THE_CONNECTION)
        return cls(scope["method"], path, target, tuple(kept), body)

    def encoded(self, more: Sequence[Header]) -> bytes:
        """The bytes of the request with these headers instead of its own of the same names."""
        names = {name for name, _ in more}
        headers = [each for each in self.headers if each[0] not in names]
        headers += [*more, (b"content-length", b"%d" % len(self.body))]
        lines = [b"%s %s HTTP/1.1" % (self.method.encode(), self.target)]
        lines += [b"%s: %s" % each for each in headers]
        return b"\r\n".join((*lines, b"", self.body))


async def read_body(receive: Receive, limit: int, seconds: float) -> bytes | None:
    """The body of a request, or little more than ``limit`` bytes of it; None if the client left.

    Raises:
        TimeoutError: it did not arrive in time.
    """
    parts, count = list[bytes](), 0
    async with asyncio.timeout(seconds):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            count += len(parts[-1])
            if count > limit or not message.get("more_body", False):
                return b"".join(parts)


def status_of(messages: list[Message]) -> int:
    status: int = messages[0]["status"]
    return status


def header_of(messages: list[Message], name: bytes) -> str:
    """The value of an answer's header; empty without one."""
    value: bytes = dict(messages[0]["headers"]).get(name, b"")
    return value.decode("latin-1")


def body_of(messages: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def refusal(path: str, error: BaseException) -> Response:
    """The answer to a request of which nothing has been answered yet."""
    return to_api_error(error).response(path)


def last_words(path: str, error: BaseException) -> bytes:
    """The end of a stream that has begun."""
    api_error = to_api_error(error)
    if is_ollama(path):
        return encode_json({"error": api_error.message}) + b"\n"
    if is_anthropic(path):
        return anthropic.error_event(error)
    if path in ("/v1/responses", "/responses"):
        fields = {name: getattr(api_error, name) for name in ("code", "message", "param")}
        return b"event: error\n" + event({"type": "error", **fields})
    return error_event(error)
