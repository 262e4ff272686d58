"""Connections of clients, as uvicorn serves them, and limits on those that do not ask anything.

Owns how long a request's headers may take and how large everything around a body may be, which
connection goes when there are too many, and that ``/health`` is answered even then. Knows no
application; how long a body may take, and its size, are :mod:`paceline.server.http.security`'s.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.server.http.config import OPEN_PATHS

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from paceline.server.http.errors import ApiError

MOST_TARGET_BYTES = 8 << 10
"""Of a request's path and query."""
MOST_HEADERS = 128
MOST_HEADER_BYTES = 32 << 10
"""Names and values of all headers of a request, those behind its body included. Cookies
and the tokens of proxies need some of it; nginx takes as much where nothing else is said."""
MOST_UNFINISHED_BYTES = MOST_TARGET_BYTES + MOST_HEADER_BYTES
"""What may come of one header, of a chunk's own head, or between two requests."""
_PARSED_BYTES = 8 << 10
"""Bytes that are parsed before the limits are looked at."""
_OTHER_FILES = 128
"""Open files of this process that are no clients' connections."""


class Lobby:
    """The connections on which no request is being answered, the one that waits longest first.

    Args:
        seconds: from a connection's start, or from the first byte of its next request, until the
            headers are complete; it is closed then.
        limit: most connections; one more closes the one that waits longest for a request.
    """

    def __init__(self, seconds: float, limit: int) -> None:
        self.seconds = seconds
        self.limit = limit
        self._waiting: dict[Connection, None] = {}

    def enter(self, connection: Connection) -> None:
        self._waiting[connection] = None

    def leave(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def make_room(self, connections: set[Any]) -> None:
        """Close the connection that waits longest, if there are too many and one waits."""
        if len(connections) >= self.limit and self._waiting:
            longest = next(iter(self._waiting))
            self.leave(longest)
            connections.discard(longest)  # at once: those that are being closed do not count
            longest.transport.close()


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits: it waits for headers as long as its :class:`Lobby` allows,
    and keeps no more of a request than the limits above. One request is parsed ahead, no more.
    """

    def __init__(self, lobby: Lobby, **given: Any) -> None:
        super().__init__(**given)
        self._lobby = lobby
        self.url = b""
        self._expiry: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._num_headers = self._num_header_bytes = 0  # of the request that arrives
        self._num_unfinished = 0  # bytes since something of a request was complete
        self._unparsed = b""
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lobby.make_room(self.connections)
        super().connection_made(transport)
        self._lobby.enter(self)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lobby.leave(self)
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unparsed += data
        self._parse()
        # What came before a request's first byte, such as its first half, ends uvicorn's own wait.
        if self._is_idle() and self._expiry is None and self.timeout_keep_alive_task is None:
            self._expect_headers()

    def _parse(self) -> None:
        """Parse what came, until a request has to wait for its turn."""
        data, parsed = self._unparsed, 0
        while parsed < len(data) and not self.pipeline and not self.transport.is_closing():
            part = data[parsed : parsed + _PARSED_BYTES]
            parsed += len(part)
            self._feed(part)
        self._unparsed = data[parsed:]
        if self._unparsed and not self.transport.is_closing():
            self.flow.pause_reading()

    def _feed(self, part: bytes) -> None:
        self._num_unfinished += len(part)
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade as offer:
            self._decline(part[offer.args[0] :])
        except httptools.HttpParserError:
            broken = _error(400, "this is no valid request of HTTP/1.1")
            self._refuse(self._refusal or broken)
        if self._num_unfinished > MOST_UNFINISHED_BYTES:
            self._refuse(self._too_long())

    def _decline(self, rest: bytes) -> None:
        """Read a request again as if it offered no other protocol: the parser skips its body.

        Java's own client offers HTTP/2 so, and sends the body with it.
        """
        headers = [pair for pair in self.headers if pair[0] != b"upgrade"]
        lines = [b"%s: %s" % pair for pair in headers]
        version = self.parser.get_http_version()
        head = f"{self.scope['method']} ".encode() + self.url + f" HTTP/{version}".encode()
        self._feed(b"\r\n".join([head, *lines, b"\r\n"]))
        self._feed(rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._num_headers = self._num_header_bytes = self._num_unfinished = 0

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > MOST_TARGET_BYTES:
            self._give_up(414, f"path and query have more than {MOST_TARGET_BYTES} bytes")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        self._num_unfinished = 0
        if self._num_headers > MOST_HEADERS:
            self._give_up(431, f"there are more than {MOST_HEADERS} headers")
        if self._num_header_bytes > MOST_HEADER_BYTES:
            self._give_up(431, f"the headers have more than {MOST_HEADER_BYTES} bytes")
        if self._is_in_head:  # what comes behind a body was not there when the caller was checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self.parser.should_upgrade():
            self._note_offer()
            return
        self._lobby.leave(self)
        self._expect_nothing()
        is_open = self._path() in OPEN_PATHS
        self.app = self.config.loaded_app if is_open or not self._is_full() else _answer_full
        self.limit_concurrency = None  # which uvicorn would answer itself, in no API's form
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unparsed:
            self._parse()
        if self._is_idle():
            self._lobby.enter(self)

    def _note_offer(self) -> None:
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._give_up(400, "this server is no proxy")
        self.scope["method"] = method.decode()

    def _give_up(self, status: int, message: str) -> None:
        """Let the parser stop, which asks for the answer then."""
        error = self._refusal = _error(status, message)
        raise error

    def _too_long(self) -> ApiError:
        if self._is_in_head:
            return _error(431, f"a header has more than {MOST_HEADER_BYTES} bytes")
        return _error(
            400, f"{MOST_UNFINISHED_BYTES} bytes came that are neither a request nor a body"
        )

    def _refuse(self, error: ApiError) -> None:
        """Close the connection; say why before, unless that could be taken for another answer."""
        if self.transport.is_closing():
            return
        if self._is_its_turn():
            self.transport.write(_written(error, self._path()))
        self.transport.close()

    def _is_its_turn(self) -> bool:
        """Whether what is written next is the answer to the request that arrives."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        return cycle.scope is self.scope and not self.pipeline and not cycle.response_started

    def _path(self) -> str:
        return self.url.partition(b"?")[0].decode("latin-1")

    def _is_full(self) -> bool:
        limit = self.config.limit_concurrency
        return limit is not None and max(len(self.connections), len(self.tasks)) >= limit

    def _is_idle(self) -> bool:
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and not self.transport.is_closing()

    def _expect_headers(self) -> None:
        self._expiry = self.loop.call_later(self._lobby.seconds, self.transport.close)

    def _expect_nothing(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


def _error(status: int, message: str) -> ApiError:
    # It comes with the frameworks, which are imported while the model is loaded.
    from paceline.server.http.errors import ApiError

    return ApiError(status, message, code="invalid_http")


def _written(error: ApiError, path: str) -> bytes:
    """A whole answer, for a request of which not enough is known to let the application answer."""
    from paceline.server.http.sse import encode_json

    body = encode_json(error.body(path))
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join((*head, "\r\n")).encode() + body


async def _answer_full(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of requests that come where all connections are in use."""
    from paceline.server.http.errors import SERVER, ApiError

    headers = {"Retry-After": "5", "Connection": "close"}
    error = ApiError(503, "all connections are in use", SERVER, code="busy", headers=headers)
    await error.response(scope["path"])(scope, receive, send)


def most_connections(wanted: int) -> int:
    """At most ``wanted``: as many as the system allows, whose limit is raised where it can be."""
    try:
        import resource
    except ImportError:  # the system has no such limit
        return wanted
    files = wanted + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return wanted
    allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    return max(allowed - _OTHER_FILES, 1)
