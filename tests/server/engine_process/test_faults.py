"""What clients see when the engine's process dies or hangs, and when they do not read."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.server.engine_process import client as engine_client
from paceline.server.http import sse
from paceline.server.http.config import ServerConfig
from paceline.server.run import DrainingServer, bind
from tests.server import factories
from tests.server.clocks import HeldClock
from tests.server.live import Server, Watch, last_error, opened, run, until

ENDLESS = 10**6


def test_a_killed_engine_is_an_error_to_all_and_is_replaced(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(partial(factories.again, str(tmp_path))) as server:
            streams = [server.ask(max_tokens=ENDLESS) for _ in range(3)]
            whole = server.ask(stream=False, max_tokens=ENDLESS)
            await until(lambda: all("x" in stream.text for stream in streams))
            server.signal(signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*(c.task for c in [*streams, whole])), 30)
            for stream in streams:
                assert last_error(stream)["code"] == "engine_dead"
            assert whole.status == 500
            assert json.loads(whole.text)["error"]["type"] == "server_error"
            assert (await server.get("/health")).json()["error"]["code"] == "starting"
            flush = await server.post("/flush_prefix_cache")
            assert (flush.status_code, flush.headers["retry-after"]) == (503, "5")
            (tmp_path / "go").touch()
            await until(lambda: server.client.state == "ready")
            assert (await server.get("/health")).status_code == 200
            await server.works()
            text = (await server.get("/metrics")).text
            assert 'paceline:engine_restarts_total{model_name="paper"} 1.0' in text
            assert (await server.get("/stats")).json()["restarts"] == 1

    run(story())


def test_an_engine_that_cannot_be_built_again_leaves_a_server_that_says_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(partial(factories.once, str(tmp_path / "built"))) as server:
            server.signal(signal.SIGKILL)
            await until(lambda: server.client.state == "failed")
            health = await server.get("/health")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "failed")
            refused = server.ask()
            await refused.task
            assert refused.status == 500
            assert "failed" in json.loads(refused.text)["error"]["message"]
            assert (await server.get("/stats")).json()["state"] == "failed"
            assert 'engine_up{model_name="paper"} 0.0' in (await server.get("/metrics")).text

    run(story())


def test_a_hung_engine_costs_its_requests_their_time_and_nothing_else(
    held_clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "STATS_SECONDS", 0.1)

    async def story() -> None:
        async with opened(request_timeout=10) as server:
            began = server.ask(max_tokens=ENDLESS)
            await until(lambda: "x" in began.text)
            server.signal(signal.SIGSTOP)
            late = [server.ask(stream=stream) for stream in (True, False)]
            left = server.ask()
            left.leaves.set()
            await left.task
            await until(lambda: server.client.num_generating == 1 + len(late))
            held_clock.passes(11)
            await asyncio.wait_for(asyncio.gather(*(c.task for c in [began, *late])), 30)
            assert last_error(began)["code"] == "request_timeout"
            for call in late:
                assert call.status == 504
                assert json.loads(call.text)["error"]["code"] == "request_timeout"
            assert server.client.num_generating == 0
            assert (await server.get("/metrics")).status_code == 200
            assert (await server.get("/stats")).status_code == 200
            server.signal(signal.SIGCONT)
            await server.works()

    run(story())


def test_while_an_engine_hangs_the_server_says_so_and_answers_what_it_knows() -> None:
    async def story() -> None:
        watch = Watch(hang_timeout=1e5, interval=0.02)
        async with opened(pulse=watch) as server:
            began = server.ask(max_tokens=ENDLESS)
            await until(lambda: getattr(server.client.last_stats, "num_running", 0) == 1)
            server.signal(signal.SIGSTOP)
            watch.is_on = True
            await until(lambda: server.client.state == "hung")
            health = await server.get("/health")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "hung")
            known = (await server.get("/stats")).json()
            assert (known["state"], known["running"]) == ("hung", 1)
            metrics = (await server.get("/metrics")).text
            assert 'engine_up{model_name="paper"} 0.0' in metrics
            assert 'num_requests_running{model_name="paper"} 1.0' in metrics
            for path in ("/v1/models", "/version", "/"):
                assert (await server.get(path)).status_code == 200
            refused = server.ask()
            await refused.task
            assert refused.status == 503
            server.signal(signal.SIGCONT)
            await until(lambda: server.client.state == "ready")
            watch.is_on = False
            began.leaves.set()
            await began.task
            await server.works()

    run(story())


@asynccontextmanager
async def listening(server: Server, **config: Any) -> AsyncIterator[DrainingServer]:
    """The server on a real socket; it must have ended by itself when the block is left."""
    listener = bind(ServerConfig(port=0, **config))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ready = asyncio.Event()
    found = DrainingServer(server.app, server.app.state.models, 30, ready.set)
    serving = asyncio.create_task(found.serve([listener]))
    await ready.wait()
    yield found
    await asyncio.wait_for(serving, 30)


def connected(server: DrainingServer, body: dict[str, Any], cut: int = 0) -> socket.socket:
    """A client that has sent a request, but for its last bytes, and reads nothing."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(server.servers[0].sockets[0].getsockname())
    client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[: len(data) - cut])
    return client


STREAM = {"prompt": [7], "max_tokens": ENDLESS, "stream": True}


def test_an_engine_that_dies_while_the_server_drains_does_not_hold_it_up() -> None:
    async def story() -> None:
        async with opened() as server, listening(server) as http:
            with connected(http, STREAM) as client:
                await until(lambda: server.client.num_generating > 0)
                http.handle_exit(signal.SIGTERM, None)
                await until(lambda: server.client.state == "draining")
                server.signal(signal.SIGKILL)
                client.settimeout(30)
                text = b""
                while data := await asyncio.to_thread(client.recv, 1 << 16):
                    text += data
                assert b'"code":"engine_dead"' in text

    run(story())


def test_a_client_that_never_reads_is_left_when_its_time_is_up(
    held_clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "_LAST_WORDS_SECONDS", 0.05)

    async def story() -> None:
        limit = {"request_timeout": 0.7}
        async with opened(**limit) as server, listening(server, **limit) as http:
            with connected(http, {**STREAM, "return_origins": True, "logprobs": 0}) as client:
                await until(lambda: server.client.num_generating > 0)
                # Nothing more can be written, or the system has left the client by itself.
                await until(lambda: all(c.flow.write_paused for c in http.server_state.connections))
                held_clock.passes(1.0)
                await until(lambda: server.client.num_generating == 0)
                await server.works()
                await until(lambda: not http.server_state.connections)
                assert client.fileno() >= 0
            http.handle_exit(signal.SIGTERM, None)

    run(story())


@pytest.mark.parametrize("leave", [socket.socket.close, lambda s: s.shutdown(socket.SHUT_WR)])
@pytest.mark.parametrize("cut", [0, 5])
def test_a_client_that_leaves_early_is_nobodys_error(
    leave: Callable[[socket.socket], None], cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with opened() as server, listening(server) as http:
            with connected(http, STREAM, cut) as client:
                await until(lambda: bool(http.server_state.tasks))
                leave(client)
                await until(lambda: not http.server_state.tasks)
                await server.works()
            http.handle_exit(signal.SIGTERM, None)

    run(story())
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
