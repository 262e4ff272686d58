"""Who may call, and how much they may send: names of the server, API keys, large and slow bodies.

A site on the web can have its own name lead to this machine (DNS rebinding). The browser then takes
that site's scripts for the server's own; but it still sends the name, as ``Host``.

The rule. A server that requires API keys answers under every name, as a site's scripts have no key:
a browser keeps one for the name under which it was given. Another answers requests whose host is

- an IP address, since only a name can be made to lead elsewhere, or not given, as by no browser;
- ``localhost``, the ``--host`` that it listens on, or one of ``--allowed-hosts`` (``*`` is any);
- a name under ``.localhost`` or ``.internal``, such as a container's for the machine it runs on;
- where it listens not only for this machine: also this machine's own name, short or full, a name
  without a dot, or one under ``.local`` or ``.svc``, as networks at home and clusters have them.

No site on the web can have a name under these endings or without a dot.

Owns this rule, and one ASGI layer around the application. Knows which endpoints need no key.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.http.config import OPEN_PATHS, ServerConfig
from paceline.server.http.errors import AUTHENTICATION, ApiError
from paceline.server.http.tracing import REQUEST_ID
from paceline.server.protocol.generation import UNENFORCED

PAGE_HEADER = "x-paceline-page"
"""With it, calls of the server's own page may bring the key as their browser keeps it."""
BROWSERS_MAY_SEND = ("*",)
"""Headers of pages of allowed origins: all, since each client library has its own."""
BROWSERS_MAY_READ = (REQUEST_ID, UNENFORCED, "retry-after")
"""Headers of answers, beyond those that every page may read."""
_CALLER = "paceline.caller"
_CLOSE = {"Connection": "close"}  # what is left of the body will not be read


class Guard:
    """Answers 403 under foreign names, 401 without a key, 413 to large bodies, 408 to slow ones.

    A key comes as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; from the server's page,
    which a person opens in a browser, also as the password of HTTP's basic authentication.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = [key.encode() for key in config.api_keys]
        self._hosts = Hosts(config)
        self._max_body_bytes = config.max_body_bytes
        self._body_seconds = config.receive_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, is_open = Headers(scope=scope), scope["path"] in OPEN_PATHS
        try:
            if not is_open:
                self._hosts.check(headers.getlist("host"))
            scope[_CALLER] = self._caller(scope, headers) if self._keys and not is_open else ""
            self._check_length(headers.get("content-length", "0"))
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, _Body(receive, self._max_body_bytes, self._body_seconds), send)

    def _caller(self, scope: Scope, headers: Headers) -> str:
        """A name for the key that was brought."""
        brought = _key(scope, headers)
        # Every key is compared, whichever fits, so that time does not tell which one was near.
        fitting = [key for key in self._keys if hmac.compare_digest(key, brought)]
        if not fitting:
            raise _unauthorised(scope)
        return hashlib.sha256(fitting[0]).hexdigest()

    def _check_length(self, length: str) -> None:
        if not length.isdecimal() or int(length[:20]) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)


class _Body:
    """``receive`` that counts while a body arrives, and does not wait for it forever."""

    def __init__(self, receive: Receive, limit: int, seconds: float) -> None:
        self._receive = receive
        self._limit = limit
        self._seconds = seconds
        self._count = 0
        self._complete = False
        self._deadline: float | None = None  # of the whole body, by the loop's clock

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                part = await self._receive()
        except TimeoutError:
            raise body_too_slow(self._seconds) from None
        self._count += len(part.get("body", b""))
        self._complete = not part.get("more_body", False)
        if self._count > self._limit:
            raise _too_large(self._limit)
        return part


def _key(scope: Scope, headers: Headers) -> bytes:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("utf-8", "surrogateescape")
    if "x-api-key" in headers:
        return headers["x-api-key"].strip().encode("utf-8", "surrogateescape")
    # A browser adds a password by itself, also where another site makes it send something. That
    # site cannot add a header without asking first, which only pages of allowed origins may.
    if scheme.lower() == "basic" and (_is_page(scope) or PAGE_HEADER in headers):
        with contextlib.suppress(binascii.Error, ValueError):
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return b""


def _is_page(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == "/" or path.startswith("/page/")


def _unauthorised(scope: Scope) -> ApiError:
    # Asked for a password, a browser shows its dialog: right for the page, wrong for its calls.
    scheme = 'Basic realm="Paceline", charset="UTF-8"' if _is_page(scope) else "Bearer"
    return ApiError(
        401,
        "the API key is missing or wrong; send the header Authorization: Bearer KEY",
        AUTHENTICATION,
        code="invalid_api_key",
        headers={"WWW-Authenticate": scheme},
    )


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is too large; at most {limit} bytes are allowed",
        code="body_too_large",
        headers=_CLOSE,
    )


def body_too_slow(seconds: float) -> ApiError:
    message = f"the body took longer than {seconds:g} s to arrive"
    return ApiError(408, message, code="body_too_slow", headers=_CLOSE)


def refuse_foreign_page(headers: Headers, allowed_origins: Sequence[str]) -> None:
    """Keep pages of other origins from endpoints that a browser calls without asking first.

    It asks before it sends JSON or unusual headers. Of a call without a body, only the header
    ``Origin`` says where it comes from.

    Raises:
        ApiError: 403, the call comes from such a page.
    """
    origin = headers.get("origin")
    if origin is None or "*" in allowed_origins or origin in allowed_origins:
        return
    if origin.partition("://")[2] != headers.get("host"):
        raise ApiError(403, "pages of another origin may not do this", code="foreign_origin")


def partition(scope: Any, cache_salt: str | None) -> str:
    """A digest of the API key and ``cache_salt``, whose requests share cached prefixes.

    Empty for a caller without key who gave no salt.
    """
    caller = scope.get(_CALLER, "")
    if not caller and not cache_salt:
        return ""
    data = f"{caller}\0{cache_salt or ''}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).hexdigest()


LOCAL = "localhost"
ENDINGS = (".localhost", ".internal")
ENDINGS_ON_NETWORKS = (".local", ".svc")


class Hosts:
    """The rule of names for one server; see the module's docstring."""

    def __init__(self, config: ServerConfig) -> None:
        self._names = {LOCAL, config.host.lower(), *map(str.lower, config.allowed_hosts)}
        self._has_keys = bool(config.api_keys)
        self._is_open = not _is_loopback(config.host)
        if self._is_open and not self._has_keys:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def check(self, given: Sequence[str]) -> None:
        """Look at the values of a request's headers ``Host``.

        Raises:
            ApiError: 403, one of them is not allowed.
        """
        for value in () if self._has_keys else given:
            name = _name(value)
            if not self._allows(name):
                raise ApiError(
                    403,
                    f"the host {name[:100]!r} is not a name of this server; allowed: addresses "
                    "and localhost, and names that it is started with: --allowed-hosts NAME",
                    code="host_not_allowed",
                )

    def _allows(self, name: str) -> bool:
        if "*" in self._names or name in self._names or _address(name) is not None:
            return True
        if name.endswith(ENDINGS):
            return True
        return self._is_open and ("." not in name or name.endswith(ENDINGS_ON_NETWORKS))


def _name(value: str) -> str:
    """A header's host without its port, in lower case."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host.lower() == LOCAL if address is None else address.is_loopback
