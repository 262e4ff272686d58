"""The application over an engine in a process of its own, for tests in which either fails."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from paceline.server.app import create_app
from paceline.server.engine_process.client import EngineClient
from paceline.server.engine_process.life import Pulse, Restarts
from paceline.server.hosting.models import Models, Offer
from paceline.server.http.config import ServerConfig
from tests.server import factories
from tests.server.asgi import RawCall, client_of, events


class Server:
    """The application over an engine in a process of its own."""

    def __init__(self, client: EngineClient, others: Sequence[Offer] = (), **config: Any) -> None:
        self.client = client
        self.app = create_app(client, ServerConfig(**config), others)
        self.models: Models = self.app.state.models

    def ask(self, stream: bool = True, max_tokens: int = 4, **body: Any) -> RawCall:
        given = {"prompt": [7], "max_tokens": max_tokens, "stream": stream, **body}
        return RawCall(self.app, "/v1/completions", json.dumps(given).encode())

    async def get(self, path: str) -> httpx.Response:
        async with client_of(self.app) as http:
            return await http.get(path)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        async with client_of(self.app) as http:
            return await http.post(path, json=body or None)

    def signal(self, number: int) -> None:
        assert self.client.pid is not None
        os.kill(self.client.pid, number)

    async def works(self) -> None:
        """A request is answered, and nothing is left over of what came before."""
        found = self.ask(stream=False)
        await found.task
        assert found.status == 200, found.text
        assert self.client.num_generating == 0
        assert self.app.state.models.first.admission.num_unfinished == 0
        while (await self.client.stats()).num_running:  # what was aborted goes when it is its turn
            await asyncio.sleep(0.005)


class Eager(Restarts):
    """Without pauses."""

    def next_pause(self) -> float | None:
        return None if super().next_pause() is None else 0.0


def unwatched() -> Pulse:
    """Of an engine whose machine may be as slow as it likes."""
    return Pulse(interval=1e5)


class Watch(Pulse):
    """Judges one engine, from when it is switched on: a slow machine's may look hung by itself."""

    is_on = False

    def restart(self) -> None:
        super().restart()
        self.is_on = False

    @property
    def is_silent(self) -> bool:
        return self.is_on and super().is_silent

    @property
    def verdict(self) -> str:
        return super().verdict if self.is_on else ""


@asynccontextmanager
async def opened(
    factory: Callable[[], Any] = factories.paper,
    restarts: Restarts | None = None,
    pulse: Pulse | None = None,
    others: Mapping[str, Callable[[], Any]] | None = None,
    **config: Any,
) -> AsyncIterator[Server]:
    """A server of an engine.

    Args:
        others: what makes further models, by their names.
    """

    def client_over(factory: Callable[[], Any]) -> EngineClient:
        return EngineClient(factory, restarts=restarts or Eager(), pulse=pulse or unwatched())

    client = client_over(factory)
    await client.start()
    offers = [Offer(client_over(made), (name,)) for name, made in (others or {}).items()]
    server = Server(client, offers, **config)
    try:
        yield server
    finally:
        await server.models.close()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 110))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def last_error(call: RawCall) -> dict[str, Any]:
    """The error that a stream, which began well, ends with."""
    assert call.status == 200
    *_, last = events(call.text)
    return last["error"]
