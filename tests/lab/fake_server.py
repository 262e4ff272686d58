"""A server that speaks OpenAI's protocol and answers by script: streams, errors, disconnects."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Clock:
    """Seconds for server and client that pass by script alone.

    The server sends an event when the client has looked at its clock for the one before.
    """

    now: float = 100.0
    looks: int = 0

    def perf_counter(self) -> float:
        self.looks += 1
        return self.now

    async def looked_at(self, looks: int) -> None:
        while self.looks == looks:
            await asyncio.sleep(0.001)


@dataclass
class Script:
    """How one request is answered.

    Attributes:
        texts: one event for each.
        tokens: of the whole answer; more than texts where events carry several.
        delay, gap: seconds before the first event and between two.
        status: other than 200 is an error.
        cut_after: drop the connection after so many texts.
        stream_error: an error event instead of the end.
    """

    texts: tuple[str, ...] = ("one", " two", " three")
    tokens: int = 3
    delay: float = 0.0
    gap: float = 0.0
    status: int = 200
    cut_after: int | None = None
    stream_error: str = ""
    usage: bool = True
    done: bool = True


@dataclass
class FakeServer:
    """Records what it was asked.

    Attributes:
        script: from a request's body and its number to its answer.
        counters: added to the metrics by each request.
        starting: answers of ``/v1/models`` that are a 503 first.
        clock: by which the scripts' seconds pass at once, for one request at a time.
    """

    script: Callable[[Mapping[str, Any], int], Script] = lambda body, number: Script()
    counters: Mapping[str, float] = field(default_factory=dict)
    prefix: str = "paceline:"
    tokenizes: str = "prompt"
    can_flush: bool = True
    starting: int = 0
    clock: Clock | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/flush_prefix_cache", self._flush)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, lambda text: {"text": text})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, lambda text: {"delta": {"content": text}}, role=True)

    async def _answer(
        self, request: web.Request, choice: Callable[[str], dict[str, Any]], role: bool = False
    ) -> web.StreamResponse:
        body = await request.json()
        script = self.script(body, len(self.bodies))
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.events.append("request")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if script.status != 200:
                error = {"error": {"message": f"refused with {script.status}", "code": 1}}
                return web.json_response(error, status=script.status)
            return await self._stream(request, script, choice, role)
        finally:
            self.running -= 1

    async def _stream(
        self,
        request: web.Request,
        script: Script,
        choice: Callable[[str], dict[str, Any]],
        role: bool,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(document: Mapping[str, Any]) -> None:
            looks = self.clock.looks if self.clock else 0
            await response.write(b"data: " + json.dumps(document).encode() + b"\n\n")
            if self.clock:
                await self.clock.looked_at(looks)

        if role:
            await send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await self._pause(script.delay)
        for number, text in enumerate(script.texts):
            if number == script.cut_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            await self._pause(script.gap if number else 0)
            await send({"choices": [{"index": 0, **choice(text), "finish_reason": None}]})
        if script.stream_error:
            await send({"error": {"message": script.stream_error}})
            return response
        await send({"choices": [{"index": 0, **choice(""), "finish_reason": "stop"}]})
        if script.usage:
            usage = {"prompt_tokens": 7, "completion_tokens": script.tokens}
            await send({"choices": [], "usage": usage})
        if script.done:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _pause(self, seconds: float) -> None:
        if self.clock:
            self.clock.now += seconds
        else:
            await asyncio.sleep(seconds)

    async def _models(self, request: web.Request) -> web.Response:
        if self.starting > 0:
            self.starting -= 1
            return web.Response(status=503, text="starting")
        return web.json_response({"data": [{"id": "org/fake-model"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        count = len(self.bodies)
        lines = ["# HELP x y"]
        for name, value in self.counters.items():
            stem, brace, labels = name.partition("{")
            lines.append(f"{self.prefix}{stem}{brace}{labels} {value * count}")
        return web.Response(text="\n".join(lines))

    async def _tokenize(self, request: web.Request) -> web.Response:
        """A token per character and one to begin with, so that nothing else counts like it."""
        text = (await request.json()).get(self.tokenizes, "")
        return web.json_response({"tokens": [0] * (len(text) + 1) if text else []})

    async def _flush(self, request: web.Request) -> web.Response:
        self.events.append("flush")
        return web.Response(status=200 if self.can_flush else 404)


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """The server on a free port, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port: int = runner.addresses[0][1]
        return port

    fake.url = f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(start(), loop).result(60)}"
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
