"""Streams beside their contents: keep-alive, slow readers, deadlines, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from paceline.server.http import sse
from paceline.server.http.sse import Deadline, EventStream, encode_json, event, while_connected
from tests.server.asgi import RawCall
from tests.server.clocks import SkippedTime

pytestmark = pytest.mark.usefixtures("skipped_time")


class Source:
    """Events that come when they are told to; whether they were closed."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.closed = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b""
            yield b"data: 1\n\n"
            await self.goes_on.wait()
            yield b"data: 2\n\n"
        finally:
            self.closed = True


def failed(error: BaseException) -> bytes:
    return f"data: {type(error).__name__}\n\n".encode()


def calling(source: Source, timeout: float | None = None) -> RawCall:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        deadline = Deadline.after(timeout)
        response = await EventStream.started(source.events(), failed, receive, deadline)
        await response(scope, receive, send)

    return RawCall(app, "/", b"")


def run(test: Any) -> None:
    asyncio.run(test())


def test_json_is_compact_and_has_no_infinities() -> None:
    assert (
        encode_json({"a": [1, "é\n", float("inf"), None]}) == '{"a":[1,"é\\n",null,null]}'.encode()
    )
    assert event([]) == b"data: []\n\n"


def test_silence_is_broken_by_comments() -> None:
    async def test() -> None:
        source = Source()
        made = calling(source)
        await asyncio.sleep(2.5 * sse.KEEP_ALIVE_SECONDS)
        source.goes_on.set()
        await made.task
        assert made.text == "data: 1\n\n" + 2 * ": keep-alive\n\n" + "data: 2\n\n"
        assert "more_body" not in made.sent[-1]
        assert source.closed

    run(test)


def test_a_reader_that_is_slow_gets_no_comments_on_top() -> None:
    async def test() -> None:
        source = Source()
        source.goes_on.set()
        made = calling(source)
        made.reads.clear()
        await asyncio.sleep(3 * sse.KEEP_ALIVE_SECONDS)
        made.reads.set()
        await made.task
        assert made.text == "data: 1\n\ndata: 2\n\n"

    run(test)


def test_the_events_are_closed_when_the_client_leaves() -> None:
    async def test() -> None:
        source = Source()
        made = calling(source)
        await made.until(lambda: "1" in made.text)
        made.leaves.set()
        await made.task
        assert source.closed
        assert "2" not in made.text

    run(test)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_deadline_ends_the_stream(is_stuck: bool, skipped_time: SkippedTime) -> None:
    async def test() -> None:
        source, began = Source(), skipped_time.now
        made = calling(source, timeout=10)
        if is_stuck:
            made.reads.clear()
        await made.task
        # The stuck one is given some time for last words.
        assert 10 <= skipped_time.now - began < (20 if is_stuck else 10.1)
        assert source.closed
        assert made.text == ("" if is_stuck else "data: 1\n\ndata: TimeoutError\n\n")

    run(test)


@pytest.mark.parametrize("leaves", [False, True])
def test_events_that_never_begin_are_not_waited_for(leaves: bool) -> None:
    closed = []

    async def never() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.sleep(60)
            yield b""
        finally:
            closed.append(True)

    async def receive() -> Any:
        await asyncio.sleep(0 if leaves else 60)
        return {"type": "http.disconnect"}

    async def test() -> None:
        with pytest.raises(sse.ClientGoneError if leaves else TimeoutError):
            await EventStream.started(never(), failed, receive, Deadline.after(30))
        assert closed

    run(test)


def test_work_is_cancelled_when_nobody_waits_for_it() -> None:
    async def test() -> None:
        ended = []

        async def work(seconds: float) -> str:
            try:
                await asyncio.sleep(seconds)
                return "done"
            finally:
                ended.append(seconds)

        async def stays() -> Any:
            await asyncio.sleep(60)

        async def leaves() -> Any:
            return {"type": "http.disconnect"}

        assert await while_connected(stays, work(0), Deadline.after(None)) == "done"
        with pytest.raises(sse.ClientGoneError):
            await while_connected(leaves, work(60), Deadline.after(None))
        with pytest.raises(TimeoutError, match=r"29\.5 s"):
            await while_connected(stays, work(30), Deadline.after(29.5))
        assert ended == [0, 60, 30]

    run(test)
