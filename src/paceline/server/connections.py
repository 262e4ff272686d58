"""Connections of clients, as uvicorn serves them, and limits on those that do not ask anything.

Owns how long a request's headers may take, which connection goes when there are too many, and that
``/health`` is answered even then. Knows no application; how long a body may take is
:mod:`paceline.server.security`'s.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.server.config import OPEN_PATHS

_OTHER_FILES = 128
"""Open files of this process that are no clients' connections."""


class Lobby:
    """The connections on which no request is being answered, the one that waits longest first.

    Args:
        seconds: from a connection's start, or from the first byte of its next request, until the
            headers are complete; it is closed then.
        limit: most connections. One more sends away the one that waits longest for a request, so
            that clients which ask nothing cannot keep out others.
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
    """uvicorn's connection; it waits for headers as long as its :class:`Lobby` allows."""

    def __init__(self, lobby: Lobby, **given: Any) -> None:
        super().__init__(**given)
        self._lobby = lobby
        self._expiry: asyncio.TimerHandle | None = None

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
        super().data_received(data)
        # What came before a request's first byte, such as its first half, ends uvicorn's own wait.
        if self._is_idle() and self._expiry is None and self.timeout_keep_alive_task is None:
            self._expect_headers()

    def on_headers_complete(self) -> None:
        self._lobby.leave(self)
        self._expect_nothing()
        is_open = self.url.partition(b"?")[0].decode("latin-1") in OPEN_PATHS
        self.limit_concurrency = None if is_open else self.config.limit_concurrency
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_idle():
            self._lobby.enter(self)

    def _is_idle(self) -> bool:
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and not self.transport.is_closing()

    def _expect_headers(self) -> None:
        self._expiry = self.loop.call_later(self._lobby.seconds, self.transport.close)

    def _expect_nothing(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


def most_connections(wanted: int) -> int:
    """How many connections the system lets this process have; its limit is raised where it can be.

    Returns:
        at most ``wanted``.
    """
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
