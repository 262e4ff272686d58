"""A server's life: the address, draining, the second signal, the line at the start."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from paceline.core.errors import ConfigError, EngineClosedError, EngineDeadError, ModelLoadError
from paceline.server.http.config import ServerConfig
from paceline.server.run import DrainingServer, address, bind, run, why_exposed
from tests.server.asgi import application
from tests.server.fakes import FakeEngine

BODY = {"prompt": "a", "max_tokens": 400, "stream": True}


class HeldEngine(FakeEngine):
    """An engine that tells one token, and the others when it goes on; it ends when it is closed."""

    def __init__(self) -> None:
        super().__init__(answer=lambda prompt: [5] * 300)
        self.goes_on = asyncio.Event()

    async def pause(self, step: int) -> None:
        if step:
            await self.goes_on.wait()

    async def close(self) -> None:
        self.error_at = (1, EngineClosedError("the engine was closed"))
        self.goes_on.set()


Test = Callable[[DrainingServer, httpx.AsyncClient], Awaitable[None]]


def served(test: Test, engine: FakeEngine, drain_timeout: float = 60.0) -> None:
    """Run a test beside a server on a real socket; the server must end by itself then."""

    async def both() -> None:
        listener = bind(ServerConfig(port=0))
        listening = asyncio.Event()
        app = application(engine)
        server = DrainingServer(app, app.state.models, drain_timeout, listening.set)
        serving = asyncio.create_task(server.serve([listener]))
        await listening.wait()
        async with httpx.AsyncClient(base_url=address(listener), timeout=60) as client:
            await test(server, client)
        await serving

    asyncio.run(asyncio.wait_for(both(), 100))


async def streaming(client: httpx.AsyncClient, then: Callable[[], Awaitable[Any]]) -> str:
    """A stream's text; something else happens after its first piece."""
    text = ""
    async with client.stream("POST", "/v1/completions", json=BODY) as response:
        async for part in response.aiter_text():
            if not text:
                await then()
            text += part
    return text


def send_signal(server: DrainingServer) -> None:
    server.handle_exit(signal.SIGTERM, None)


def test_the_first_signal_lets_what_is_in_flight_finish() -> None:
    engine = HeldEngine()

    async def test(server: DrainingServer, client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200
        places = server.config.app.state.models.first.admission.limit  # type: ignore[union-attr]
        assert server.config.limit_concurrency is not None
        assert server.config.limit_concurrency >= 4 * places

        async def then() -> None:
            send_signal(server)
            for path, status in (("/health", 503), ("/readyz", 503), ("/livez", 200)):
                assert (await client.get(path)).status_code == status
            refused = await client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"].isdigit()
            engine.goes_on.set()

        text = await streaming(client, then)
        assert '"finish_reason":"stop"' in text
        assert text.endswith("data: [DONE]\n\n")

    served(test, engine)


def test_what_outlasts_the_drain_timeout_is_ended_with_an_error() -> None:
    async def test(server: DrainingServer, client: httpx.AsyncClient) -> None:
        async def then() -> None:
            send_signal(server)

        text = await streaming(client, then)
        assert '"code":"engine_closed"' in text
        assert text.endswith("data: [DONE]\n\n")

    served(test, HeldEngine(), drain_timeout=0.0)


def test_the_second_signal_ends_at_once() -> None:
    async def test(server: DrainingServer, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", json=BODY) as response:
            await anext(response.aiter_text())
            send_signal(server)
            assert not server.should_exit
            send_signal(server)
            assert server.should_exit
            while server.servers[0].is_serving():  # though a stream is open
                await asyncio.sleep(0.01)

    served(test, HeldEngine())


def test_a_taken_address_is_an_error_before_anything_is_loaded() -> None:
    engine = FakeEngine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*--port"):
            run(engine, ServerConfig(port=port), print)
    assert engine.state == "starting"
    with pytest.raises(ConfigError, match="cannot listen on no"):
        bind(ServerConfig(host="no.such.host.invalid"))


def test_a_model_that_does_not_load_ends_the_server() -> None:
    class Broken(FakeEngine):
        async def start(self) -> None:
            raise ModelLoadError("there is no model at /nowhere")

    engine = Broken()
    with pytest.raises(ModelLoadError, match="no model"):
        run(engine, ServerConfig(port=0), print)
    assert engine.state == "closed"


def test_an_engine_that_is_not_started_again_ends_the_server_with_an_error() -> None:
    engine = FakeEngine()

    def fail(line: str) -> None:
        engine.state, engine.failure = "failed", "the engine died: out of luck"

    with pytest.raises(EngineDeadError, match="the server ends: the engine died: out of luck"):
        run(engine, ServerConfig(port=0), fail)
    assert engine.state == "closed"


def test_addresses_are_written_as_urls_have_them() -> None:
    with bind(ServerConfig(port=0)) as listener:
        assert address(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    with bind(ServerConfig(host="::1", port=0)) as listener:
        assert address(listener).startswith("http://[::1]:")


@pytest.mark.parametrize(
    ("bound_to", "keys", "is_warned"),
    [
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("192.168.1.7", (), True),
        ("fe80::1%eth0", (), True),
        ("0.0.0.0", ("secret",), False),
        ("127.0.0.1", (), False),
        ("::1", (), False),
    ],
)
def test_a_server_that_answers_everybody_says_so(
    bound_to: str, keys: tuple[str, ...], is_warned: bool
) -> None:
    said = why_exposed(ServerConfig(api_keys=keys), bound_to)
    assert (said is not None) == is_warned
    assert said is None or (bound_to in said and "--api-key" in said)
