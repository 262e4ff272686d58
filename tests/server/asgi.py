"""The application over a scripted engine, called without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
from fastapi import FastAPI

from paceline.server.app import create_app
from paceline.server.http.config import ServerConfig
from tests.server.fakes import FakeEngine


def application(engine: FakeEngine | None = None, **config: Any) -> FastAPI:
    engine = engine or FakeEngine()
    engine.state = "ready"
    return create_app(engine, ServerConfig(**config))


def engine_of(app: FastAPI) -> FakeEngine:
    return app.state.models.first.client


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    async def one() -> httpx.Response:
        async with client_of(app) as client:
            return await client.request(method, path, **options)

    return asyncio.run(one())


def post(app: FastAPI, path: str, body: Any, **options: Any) -> httpx.Response:
    return call(app, "POST", path, json=body, **options)


def complete(app: FastAPI, prompt: Any = "Once", **body: Any) -> dict[str, Any]:
    response = post(app, "/v1/completions", {"prompt": prompt, **body})
    assert response.status_code == 200, response.text
    return response.json()


def refused(
    app: FastAPI, path: str, body: Any, status: int = 400, **options: Any
) -> dict[str, Any]:
    """The error that a body is answered with, which has OpenAI's shape."""
    response = post(app, path, body, **options)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(text: str) -> list[Any]:
    """The documents of a stream, which must end with ``[DONE]``."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def streamed(app: FastAPI, prompt: Any = "Once", **body: Any) -> list[Any]:
    """The documents that a completion is streamed as."""
    response = post(app, "/v1/completions", {"prompt": prompt, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


class RawCall:
    """One request by the protocol of ASGI itself, whose client can leave or be slow to read."""

    def __init__(self, app: Any, path: str, body: bytes, headers: Sequence[tuple[str, str]] = ()):
        self.sent: list[dict[str, Any]] = []
        self.num_offered = 0  # messages, those that wait for a slow reader among them
        self.leaves = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self._body: list[dict[str, Any]] = [{"type": "http.request", "body": body}]
        names = [("content-type", "application/json"), *headers]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in names],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.ensure_future(app(self._scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return self._body.pop(0)
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.num_offered += 1
        await self.reads.wait()
        self.sent.append(dict(message))

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.sent).decode()

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    async def until(self, condition: Any) -> None:
        """Let everything else run until something holds."""
        try:
            async with asyncio.timeout(60):
                while not condition():
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise AssertionError(f"never: {self.sent}") from None
