"""Requests sent to a replica's own address, over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from paceline.ray import links
from paceline.ray.links import (
    RANK,
    Address,
    Gate,
    Links,
    ReplicaCall,
    body_of,
    header_of,
    status_of,
)
from paceline.server.http.config import ServerConfig
from paceline.server.run import Listener, bind

TOKEN = "a-token"
BODY = b"word " * 50_000


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[Address]:
    config = ServerConfig(host="127.0.0.1", port=0)
    with bind(config) as listener:
        server = Listener(Gate(app, TOKEN, lambda: "3"), config, date_header=False)
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0)
        yield Address("127.0.0.1", listener.getsockname()[1], TOKEN)
        server.should_exit = True
        await serving


def call_of(method: str = "POST", body: bytes = BODY) -> ReplicaCall:
    return ReplicaCall(method, "/", b"/", ((b"host", b"localhost"),), body)


async def whole(links: Links, address: Address, call: ReplicaCall) -> list[Message]:
    async with aclosing(links.answer(address, call)) as parts:
        return [message async for part in parts for message in part]


class Echo:
    """Sends a body back in two pieces, and counts the connections."""

    def __init__(self, status: int = 200) -> None:
        self.clients = set[Any]()
        self._status = status

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.clients.add(tuple(scope["client"]))
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": self._status, "headers": []})
        await send({"type": "http.response.body", "body": body[:9], "more_body": True})
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": body[9:]})


def test_answers_come_whole_over_one_connection() -> None:
    async def story() -> None:
        app, links = Echo(), Links()
        async with listening(app) as address:
            for method in ("POST", "PUT", "POST"):
                messages = await whole(links, address, call_of(method))
                assert status_of(messages) == 200
                assert body_of(messages) == BODY
                assert header_of(messages, RANK) == "3"
                assert header_of(messages, b"date") == ""
            assert len(app.clients) == 1
            links.keep([])
            await whole(links, address, call_of())
            assert len(app.clients) == 2

    asyncio.run(story())


def test_two_answers_at_once_have_connections_of_their_own() -> None:
    async def story() -> None:
        app, links = Echo(), Links()
        async with listening(app) as address:
            both = [whole(links, address, call_of(body=each)) for each in (b"a", b"b")]
            assert [body_of(each) for each in await asyncio.gather(*both)] == [b"a", b"b"]
        assert len(app.clients) == 2

    asyncio.run(story())


@pytest.mark.parametrize(("status", "num_parts"), [(200, 2), (500, 1)])
def test_an_answer_comes_as_it_is_made_and_an_error_whole(status: int, num_parts: int) -> None:
    async def story() -> None:
        async with listening(Echo(status)) as address:
            parts = [part async for part in Links().answer(address, call_of(body=b"x" * 20))]
            bodies = [body_of(part) for part in parts if body_of(part)]
            assert [len(body) for body in bodies] == ([9, 11] if num_parts == 2 else [20])
            assert len(parts[0]) > 1 or num_parts == 2
            assert status_of(parts[0]) == status

    asyncio.run(story())


def test_a_head_has_no_body_to_wait_for() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"never"})

    async def story() -> None:
        async with listening(app) as address:
            messages = await whole(Links(), address, call_of("HEAD"))
            assert header_of(messages, b"content-length") == "5"
            assert body_of(messages) == b""

    asyncio.run(story())


def test_who_does_not_know_the_token_is_refused() -> None:
    async def story() -> None:
        app = Echo()
        async with listening(app) as address:
            messages = await whole(Links(), address._replace(token="another"), call_of())
            assert status_of(messages) == 403
        assert not app.clients

    asyncio.run(story())


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", b"what is this?\r\n\r\n"],
)
def test_an_answer_that_breaks_is_an_error(answer: bytes) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def story() -> None:
        async with await asyncio.start_server(half, "127.0.0.1", 0) as server:
            address = Address(*server.sockets[0].getsockname()[:2], TOKEN)
            with pytest.raises(OSError, match="the replica"):
                await whole(Links(), address, call_of(body=b""))
        with pytest.raises(OSError, match="Connect"):
            await whole(Links(), address, call_of())

    asyncio.run(story())


def test_a_machine_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(host: str, port: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", nobody)
    monkeypatch.setattr(links, "CONNECT_SECONDS", 0.01)
    with pytest.raises(TimeoutError):
        asyncio.run(whole(Links(), Address("host", 1, TOKEN), call_of()))


def test_the_replica_hears_that_the_client_has_left() -> None:
    heard = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        heard.set()

    async def story() -> None:
        async with listening(app) as address:
            async with aclosing(Links().answer(address, call_of())) as parts:
                await anext(parts)
            async with asyncio.timeout(60):
                await heard.wait()

    asyncio.run(story())
