"""Clients that connect and ask nothing, or half of something; real sockets, a scripted engine."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from paceline.server import run as run_module
from paceline.server.http.config import ServerConfig
from paceline.server.http.connections import most_connections
from paceline.server.run import DrainingServer, bind
from tests.server.asgi import application
from tests.server.fakes import FakeEngine
from tests.server.live import run, until

FOR_EVER = 1e5  # seconds, of a limit that must not matter
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MODELS = HEALTH.replace(b"health", b"v1/models")


@asynccontextmanager
async def listening(
    seconds: float = FOR_EVER, engine: FakeEngine | None = None, **config: Any
) -> AsyncIterator[DrainingServer]:
    """A server whose clients have so long for a request's headers."""
    listener, ready = bind(ServerConfig(port=0)), asyncio.Event()
    app = application(engine or FakeEngine(), receive_timeout=seconds, **config)
    server = DrainingServer(app, app.state.models, 0, ready.set)
    serving = asyncio.create_task(server.serve([listener]))
    await ready.wait()
    try:
        yield server
    finally:
        server.should_exit = server.force_exit = True
        await serving


def connected(server: DrainingServer) -> socket.socket:
    client = socket.create_connection(server.servers[0].sockets[0].getsockname())
    client.settimeout(60)
    return client


async def said(client: socket.socket) -> bytes:
    """What the server says next; nothing when it has closed the connection."""
    return await asyncio.to_thread(client.recv, 1 << 16)


async def status(client: socket.socket, request: bytes) -> int:
    client.sendall(request)
    head, _, body = (await said(client)).partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    while len(body) < length:
        body += await said(client)
    return int(head.split()[1])


HALF = b"GET /health HTTP/1.1\r\nHost: loc"


@pytest.mark.parametrize(
    ("before", "sent"), [(0, b""), (0, b"\r\n"), (0, HALF), (1, b"\r\n"), (1, HALF)]
)
def test_headers_that_do_not_arrive_are_not_waited_for(before: int, sent: bytes) -> None:
    async def story() -> None:
        async with listening(seconds=0.05) as server:
            with connected(server) as client:
                for _ in range(before):
                    assert await status(client, HEALTH) == 200
                client.sendall(sent)
                assert await said(client) == b""
            await until(lambda: not server.server_state.connections)

    run(story())


def test_headers_in_drops_have_no_more_time_than_others() -> None:
    async def story() -> None:
        async with listening(seconds=0.05) as server:
            with connected(server) as client:
                client.sendall(b"GET /health HTTP/1.1\r\n")
                closing = asyncio.create_task(said(client))
                with suppress(ConnectionError):  # a drop that came too late
                    while not closing.done():
                        client.sendall(b"a: b\r\n")
                        await asyncio.wait([closing], timeout=0.01)
                    assert await closing == b""
            await until(lambda: not server.server_state.connections)

    run(story())


def test_an_answer_may_take_longer_than_headers() -> None:
    async def story() -> None:
        engine = FakeEngine()
        engine.seconds_per_token = 0.01
        async with listening(0.02, engine) as server:
            with connected(server) as client:
                body = b'{"prompt": "a", "max_tokens": 10}'
                head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
                assert await status(client, head + body) == 200

    run(story())


async def _with_room_for(
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    story: Callable[[DrainingServer], Awaitable[None]],
) -> None:
    monkeypatch.setattr(run_module, "most_connections", lambda wanted: most)
    async with listening() as server:
        await story(server)


def test_clients_that_ask_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(server: DrainingServer) -> None:
        silent = [connected(server) for _ in range(40)]
        with connected(server) as first:
            assert await status(first, MODELS) == 200
            silent += [connected(server) for _ in range(5)]
            with connected(server) as second:
                assert await status(second, MODELS) == 200
        assert len(server.server_state.connections) <= 8
        assert await said(silent[0]) == b"", "who waits longest goes first"
        for client in silent:
            client.close()

    run(_with_room_for(monkeypatch, 8, story))


def test_health_is_answered_when_every_connection_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
    head += b"Content-Type: application/json\r\n\r\n"

    async def story(server: DrainingServer) -> None:
        busy = []
        for count in range(1, 8):
            busy.append(connected(server))
            busy[-1].sendall(head)  # the body never comes
            await until(lambda count=count: len(server.server_state.tasks) == count)
        for request, expected in ((MODELS, 503), (HEALTH, 200)):
            with connected(server) as client:
                assert await status(client, request) == expected
        for client in busy:
            client.close()
        await until(lambda: not server.server_state.tasks)

    run(_with_room_for(monkeypatch, 8, story))


def test_the_limit_of_open_files_is_raised_or_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [256, 1024]

    def set_limits(kind: int, wanted: tuple[int, int]) -> None:
        limits[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    assert most_connections(500) == 500
    assert 500 < limits[0] < 1024
    assert most_connections(5000) < limits[0] == 1024
