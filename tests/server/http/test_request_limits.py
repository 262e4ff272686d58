"""Requests whose parts around the body have no end, from clients without a key; real sockets.

What the process keeps of them is measured by what Python allocates.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc
from collections.abc import Iterator

import pytest

from paceline.server.http.connections import (
    MOST_HEADER_BYTES,
    MOST_HEADERS,
    MOST_TARGET_BYTES,
)
from paceline.server.run import DrainingServer
from tests.server.fakes import FakeEngine
from tests.server.http.test_connections import HEALTH, connected, listening, said, status
from tests.server.live import run, until

LINE = b"POST /v1/completions HTTP/1.1\r\n"
HEAD = LINE + b"Host: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SENT_BYTES = 12 << 20
KEPT_BYTES = 2 << 20
ENDLESS = {
    "target": (b"GET /", b"a" * 1000, 414),
    "query": (b"GET /v1/models?", b"a=b&" * 250, 414),
    "method": (b"", b"A" * 1000, 400),
    "version": (b"GET / HTTP/1.1", b"1" * 1000, 400),
    "headers": (HEAD, b"a: b\r\n" * 200, 431),
    "equal headers": (HEAD, b"Host: localhost\r\n" * 60, 431),
    "name": (HEAD, b"a" * 1000, 431),
    "value": (HEAD + b"a:", b"b" * 1000, 431),
    "white space before a value": (HEAD + b"a:", b" " * 1000, 431),
    "chunk extension": (CHUNKED + b"5;a=", b"b" * 1000, 400),
    "chunk extensions": (CHUNKED + b"5", b";a=b" * 250, 400),
    "chunk size": (CHUNKED, b"0" * 1000, 400),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * 200, 431),
    "trailer": (CHUNKED + b"0\r\na:", b"b" * 1000, 400),
    "empty lines": (b"", b"\r\n" * 500, 400),
}


def flood(client: socket.socket, begin: bytes, part: bytes) -> bytes:
    """Send until the server has had enough; what it says then."""
    more = part * (1 + (64 << 10) // len(part))
    try:
        client.sendall(begin)
        for _ in range(SENT_BYTES // len(more)):
            client.sendall(more)
    except ConnectionError:
        pass
    found = b""
    try:
        while data := client.recv(1 << 16):
            found += data
    except ConnectionError:
        pass
    return found


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


async def check_kept(server: DrainingServer, kind: str) -> None:
    begin, part, expected = ENDLESS[kind]
    with connected(server) as client, connected(server) as other:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        flooding = asyncio.create_task(asyncio.to_thread(flood, client, begin, part))
        assert await status(other, HEALTH) == 200
        # Where a body had begun, the missing key may have been answered before.
        head, _, body = (await flooding).rpartition(b"HTTP/1.1 ")[2].partition(b"\r\n\r\n")
        assert tracemalloc.get_traced_memory()[1] - before < KEPT_BYTES, kind
    assert int(head.split()[0]) == expected, kind
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")


def test_what_has_no_end_is_not_kept(traced: None) -> None:
    async def story() -> None:
        async with listening(api_keys=("right",)) as server:
            for kind in ENDLESS:
                await check_kept(server, kind)

    run(story())


WIDE = {
    "target": b"GET /health?" + b"a" * (MOST_TARGET_BYTES - 12) + b" HTTP/1.1\r\n",
    "headers": HEALTH[:-2] + b"a: b\r\n" * (MOST_HEADERS - 1),
    "header": HEALTH[:-2] + b"a: " + b"b" * (MOST_HEADER_BYTES - 14) + b"\r\n",
}


def test_what_is_within_the_limits_is_answered() -> None:
    async def story() -> None:
        async with listening() as server:
            for kind, wide in WIDE.items():
                beyond = 200 if kind == "target" else 431
                for more, expected in ((b"", 200), (b"c: d\r\n", beyond)):
                    with connected(server) as client:
                        assert await status(client, wide + more + b"\r\n") == expected, kind

    run(story())


FORMS = {
    b"/v1/chat/completions": {"message", "type", "param", "code"},
    b"/v1/messages": {"message", "type"},
    b"/api/chat": None,
}


def test_refusals_have_the_form_of_their_api() -> None:
    async def story() -> None:
        async with listening() as server:
            for path, keys in FORMS.items():
                begin = b"POST %s HTTP/1.1\r\n" % path
                long = begin + b"a: " + b"b" * MOST_HEADER_BYTES
                for request, expected in (long, 431), (begin + b"broken", 400):
                    with connected(server) as client:
                        client.sendall(request + b"\r\n\r\n")
                        head, _, body = (await said(client)).partition(b"\r\n\r\n")
                        assert int(head.split()[1]) == expected
                        error = json.loads(body)["error"]
                        assert isinstance(error, str) if keys is None else set(error) == keys

    run(story())


def posted(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


ASKED = b'{"prompt": "a", "max_tokens": 3}'
COUNT = 400


def test_requests_in_advance_are_answered_in_turn() -> None:
    async def story() -> None:
        async with listening() as server:
            with connected(server) as client:
                client.sendall(posted(ASKED) + HEALTH * COUNT + posted(ASKED))
                found = b""
                while not found.endswith(b"}") or found.count(b"HTTP/1.1 200 OK") < COUNT + 2:
                    data = await said(client)
                    assert data
                    found += data
                answers = found.split(b"HTTP/1.1 200 OK")[1:]
                assert [b"choices" in each for each in answers] == [True, *[False] * COUNT, True]

    run(story())


def test_requests_in_advance_wait_as_bytes(traced: None) -> None:
    engine = FakeEngine()
    engine.seconds_per_token = 1e5

    async def story() -> None:
        async with listening(engine=engine) as server:
            with connected(server) as client:
                client.sendall(posted(ASKED))
                await until(lambda: len(engine.calls) == 1)
                (connection,) = server.server_state.connections
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                client.setblocking(False)
                client.send(HEALTH * 30_000)
                await until(lambda: connection.flow.read_paused)
                assert tracemalloc.get_traced_memory()[1] - before < 2 * KEPT_BYTES

    run(story())


def test_what_follows_a_request_does_not_disturb_its_answer() -> None:
    """What nobody can parse ends the connection, and says nothing into a running stream."""
    body = b'{"prompt": "a", "max_tokens": 500, "ignore_eos": true, "stream": true}'
    engine = FakeEngine()
    engine.seconds_per_token = 0.01

    async def story() -> None:
        async with listening(engine=engine) as server:
            with connected(server) as client:
                client.sendall(posted(body))
                found = await said(client)
                client.sendall(b"nonsense\r\n\r\n")
                while data := await said(client):
                    found += data
                assert found.count(b"HTTP/1.1") == 1
            await until(lambda: engine.calls[0].aborted)

    run(story())


def test_headers_behind_a_body_change_nothing() -> None:
    chunk = b'{"prompt": "a", "max_tokens": 1}'
    data = CHUNKED.replace(b"application/json", b"text/plain") + b"%x\r\n%s\r\n0\r\n" % (
        len(chunk),
        chunk,
    )

    async def story() -> None:
        async with listening() as server:
            with connected(server) as client:
                late = b"Content-Type: application/json\r\n\r\n"
                assert await status(client, data + late) == 415
                assert await status(client, CHUNKED + data.partition(b"\r\n\r\n")[2] + late) == 200

    run(story())


def test_an_offer_of_http_2_costs_no_body() -> None:
    """Java's own client makes one with its first request, whose body comes at once."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"

    async def story() -> None:
        async with listening() as server:
            with connected(server) as client:
                for _ in range(2):
                    assert await status(client, posted(ASKED, HEAD + offer)) == 200

    run(story())
