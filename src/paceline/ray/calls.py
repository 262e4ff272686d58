"""One HTTP request, as the ingress sends it to a replica. Knows no Ray and no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import Message, Receive, Scope

Header = tuple[bytes, bytes]
_OF_THE_CONNECTION = frozenset(
    b"connection content-length expect keep-alive te trailer transfer-encoding upgrade".split()
)
"""Headers that say how one connection carries a request, and not what is asked."""


@dataclass(frozen=True)
class Call:
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
    def of(cls, scope: Scope, body: bytes) -> Call:
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
    """The body of a request.

    Args:
        limit: bytes; of a larger body a little more than that is read.

    Returns:
        None where the client left.

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
    found = (value for each, value in messages[0]["headers"] if each == name)
    return next(found, b"").decode("latin-1")


def body_of(messages: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)
