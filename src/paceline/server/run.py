"""A server's life: listen, start the engine, serve, drain, end. Owns signals and the address.

The first SIGTERM or SIGINT drains: ``/health`` answers 503, new requests are refused, those in
flight get ``drain_timeout`` and are ended then. The second ends everything at once. An engine that
is not started again ends the server with an error, so that a supervisor can start it anew.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from paceline.core.errors import ConfigError, EngineDeadError
from paceline.request.engine_stats import EngineInfo
from paceline.server.engine_process.client import EngineClient
from paceline.server.http.config import ServerConfig
from paceline.server.http.connections import Connection, Lobby, most_connections

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from paceline.server.hosting.models import Models, Offer

log = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep a connection that they do not use, so that none is closed while one
sends its next request."""
_CONNECTIONS = 4
"""For each request that may be unfinished."""
_SPARE_CONNECTIONS = 256
_MOST_CONNECTIONS = 1 << 16
"""Where it is not known how many requests may be unfinished."""
_LONGEST_PATIENCE_MS = (1 << 31) - 1
_LAST_WORDS_SECONDS = 5
"""For error bodies to reach their clients, once the engine has ended."""


def run(
    client: EngineClient,
    config: ServerConfig,
    announce: Callable[[str], None],
    others: Sequence[Offer] = (),
) -> None:
    """Serve until a signal ends it.

    Args:
        client: of the first model, not started.
        announce: told one line when requests are answered.
        others: models that are loaded when a request asks for them.

    Raises:
        ConfigError: the address cannot be listened on.
        EngineDeadError: the engine died, and is not started again any more.
        PacelineError: the engine cannot be built.
    """
    listener = bind(config)
    if warning := why_exposed(config, listener.getsockname()[0]):
        log.warning(warning)
    with listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(client, config, listener, announce, others))


async def _serve(
    client: EngineClient,
    config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[str], None],
    others: Sequence[Offer],
) -> None:
    try:
        app = await started_app(client, config, others)
        models: Models = app.state.models
        others_names = (each.name for each in models.all[1:])
        names = (*models.first.names, *others_names)
        line = start_line(client.info, names, address(listener))
        # What lives from here to the end need not be looked at again and again.
        gc.collect()
        gc.freeze()
        server = DrainingServer(app, models, config.drain_timeout, lambda: announce(line))
        try:
            await server.serve(sockets=[listener])
            if models.failure:
                raise EngineDeadError(f"the server ends: {models.failure}")
        finally:
            await models.close()
    finally:
        await client.close()


async def started_app(
    client: EngineClient, config: ServerConfig, others: Sequence[Offer]
) -> FastAPI:
    """The application over an engine that is started here; raises as ``EngineClient.start``.

    The frameworks take as long to import as a small model to load; the two go side by side.
    """
    starting = asyncio.create_task(client.start())
    try:
        create_app, warm_up = await asyncio.to_thread(_application)
        await starting
        await warm_up(client.tokenizer)
        return create_app(client, config, others)
    finally:
        starting.cancel()


def _application() -> tuple[Callable[..., FastAPI], Callable[..., Awaitable[None]]]:
    from paceline.server.app import create_app
    from paceline.server.chat.prompt import warm_up

    return create_app, warm_up


class DrainingServer(uvicorn.Server):
    """uvicorn, which goes on listening while it drains, so that ``/health`` can say so."""

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        drain_timeout: float,
        on_listening: Callable[[], None],
    ) -> None:
        limit = most_connections(_SPARE_CONNECTIONS + _CONNECTIONS * models.limit)
        super().__init__(_settings(app, models.config, limit))
        self._models = models
        self._drain_timeout = drain_timeout
        self._on_listening = on_listening
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_told_to_end = False
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end, which uvicorn asks ten times a second: also without an engine."""
        return bool(self._models.failure) or await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What uvicorn does on a signal; here it may interrupt anything."""
        if self._is_told_to_end or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self._is_told_to_end = True
        self._models.drain()
        self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._drain = asyncio.create_task(self._drained())

    async def _drained(self) -> None:
        """Wait for what is in flight, end the rest, then let the server end."""
        models = self._models
        log.info("draining: %d samples are unfinished", models.num_unfinished)
        try:
            await models.drained(self._drain_timeout)
            if models.num_unfinished:
                log.warning("drain timeout: ending %d unfinished samples", models.num_unfinished)
                await models.close()
        finally:
            self.should_exit = True


class Listener(uvicorn.Server):
    """uvicorn without signals, for replicas; ``options`` are uvicorn's own."""

    def __init__(self, app: ASGIApp, config: ServerConfig, **options: Any) -> None:
        super().__init__(_settings(app, config, most_connections(_MOST_CONNECTIONS), **options))

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _settings(app: ASGIApp, config: ServerConfig, limit: int, **options: Any) -> uvicorn.Config:
    lobby = Lobby(config.receive_timeout, limit - 1)
    settings = {
        "http": partial(Connection, lobby),
        "access_log": False,
        "log_config": None,
        "log_level": "warning",
        "lifespan": "off",
        "ws": "none",
        "server_header": False,
        "limit_concurrency": limit,
        "proxy_headers": False,
        "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": _LAST_WORDS_SECONDS,
    }
    return uvicorn.Config(app, **{**settings, **options})


def bind(config: ServerConfig) -> socket.socket:
    """A socket at the server's address, before anything slow happens.

    Raises:
        ConfigError: the address is taken, not allowed, or not this machine's.
    """
    try:
        addresses = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        *family, _, where = addresses[0]
        listener = socket.socket(*family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _limit_patience(listener, config)
        listener.bind(where)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; choose "
            "another --host or --port"
        ) from error
    return listener


def _limit_patience(listener: socket.socket, config: ServerConfig) -> None:
    """Let the system end connections whose clients take nothing while a request may last."""
    if config.timeout is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = math.ceil(min(config.timeout * 1e3, _LONGEST_PATIENCE_MS))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def address(listener: socket.socket) -> str:
    """Where to reach the server from this machine."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def why_exposed(config: ServerConfig, bound_to: str) -> str | None:
    """A warning about a server that answers anybody who reaches this machine; None without need.

    Args:
        bound_to: the numeric address that it listens on.
    """
    if config.api_keys or ipaddress.ip_address(bound_to.partition("%")[0]).is_loopback:
        return None
    return (
        f"anyone who can reach this machine at {bound_to} is answered: --api-key requires a key, "
        "and --host 127.0.0.1 listens on this machine only"
    )


def start_line(info: EngineInfo, names: tuple[str, ...], where: str) -> str:
    """What is served, by what, under which promise, and where."""
    promise = "identical to plain decoding" if info.promises_identity else "equal up to rounding"
    proposers = ", ".join(info.proposers) or "none"
    return (
        f"paceline serves {', '.join(names)} at {where} ({info.dtype}, {info.backend}; "
        f"proposers: {proposers}; output {promise}; sampling: {info.sampling})"
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """A faster event loop, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
