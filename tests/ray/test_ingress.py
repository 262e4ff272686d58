"""What the ingress does when replicas refuse, die or know nothing of what is asked, without Ray
running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message

pytest.importorskip("ray", reason="replicas need the extra ray")

from paceline.ray import ingress
from paceline.ray.ingress import Relay
from paceline.ray.links import Address, Gate, Links, ReplicaCall
from paceline.server.http.config import ServerConfig
from tests.server.asgi import application, events
from tests.server.chats import chat_tokenizer
from tests.server.fakes import FakeEngine

PROMPT = {"prompt": "Once"}


class Replicas(Links):
    """Applications instead of replicas at addresses; requests go to them in turn.

    Attributes:
        dying: by name, after how many parts of an answer a replica dies.
        asked: names of the replicas, in the order in which they were asked.
    """

    def __init__(self, **apps: Any) -> None:
        super().__init__()
        self.apps = {name: Gate(app, "", lambda name=name: name) for name, app in apps.items()}
        self.dying: dict[str, int] = {}
        self.asked: list[str] = []

    def addresses(self) -> dict[str, Address]:
        return {name: Address(name, 0, "") for name in self.apps}

    async def answer(
        self, address: Address, call: ReplicaCall, headers: Any = ()
    ) -> AsyncGenerator[list[Message], None]:
        name, num_parts = address.host, 0
        self.asked.append(name)
        async with aclosing(answered(self.apps[name], call)) as parts:
            async for messages in parts:
                if self.dying.get(name) == num_parts:
                    raise ConnectionResetError
                num_parts += 1
                yield messages


async def answered(app: ASGIApp, call: ReplicaCall) -> AsyncGenerator[list[Message], None]:
    """What an application sends; what it sends without waiting comes together."""
    sent = asyncio.Queue[Any]()
    left = asyncio.Event()
    bodies = [call.body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop()}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    length = b"%d" % len(call.body)
    scope = {
        "type": "http",
        "method": call.method,
        "path": call.path,
        "query_string": b"",
        "headers": [*call.headers, (b"content-length", length)],
    }
    task = asyncio.ensure_future(app(scope, receive, send))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (first := await sent.get()) is not None:
            messages = [first]
            while not sent.empty() and (more := sent.get_nowait()) is not None:
                messages.append(more)
            yield messages
            if task.done() and sent.empty():
                break
    finally:
        left.set()
        await task


def ask(
    replicas: Replicas, path: str = "/v1/completions", body: Any = PROMPT, **config: Any
) -> httpx.Response:
    app = Relay(replicas.addresses, ServerConfig(**config), replicas)

    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request("GET" if body is None else "POST", path, json=body)

    return asyncio.run(one())


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def chat_application() -> Any:
    return application(FakeEngine(tokenizer=chat_tokenizer()))


def test_a_replica_that_refuses_is_passed_over() -> None:
    full = application(FakeEngine())
    full.state.models.first.admission.num_unfinished = 10**6
    replicas = Replicas(a=full, b=application())
    assert text_of(ask(replicas))
    assert replicas.asked == ["a", "b"]


def test_where_all_refuse_the_client_is_told_when_to_come_back() -> None:
    apps = [application(FakeEngine()) for _ in range(2)]
    for app in apps:
        app.state.models.first.admission.num_unfinished = 10**6
    response = ask(Replicas(a=apps[0], b=apps[1]))
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_death_before_the_first_byte_is_not_seen(stream: bool) -> None:
    replicas = Replicas(a=application(), b=application())
    replicas.dying = {"a": 0}
    response = ask(replicas, body={**PROMPT, "stream": stream})
    assert response.status_code == 200
    assert replicas.asked == ["a", "b"]


def test_an_engine_that_died_before_the_first_byte_is_not_seen() -> None:
    replicas = Replicas(a=application(FakeEngine(dies_at=0)), b=application())
    assert text_of(ask(replicas))
    assert replicas.asked == ["a", "b"]


def test_a_request_kills_two_replicas_at_most() -> None:
    replicas = Replicas(**{name: application() for name in "abc"})
    replicas.dying = dict.fromkeys("abc", 0)
    response = ask(replicas)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_dead"
    assert replicas.asked == ["a", "b"]


def test_a_stream_whose_replica_dies_ends_with_an_error() -> None:
    replicas = Replicas(a=application(FakeEngine(seconds_per_token=0.01)), b=application())
    replicas.dying = {"a": 2}
    *told, last = events(ask(replicas, body={**PROMPT, "stream": True}).text)
    assert told
    assert last["error"]["code"] == "engine_dead"
    assert replicas.asked == ["a"]


def test_health_is_that_of_the_best() -> None:
    draining, ready = application(), application()
    draining.state.models.drain()
    assert ask(Replicas(a=draining, b=ready), "/health", None).status_code == 200
    assert ask(Replicas(a=draining, b=draining), "/health", None).status_code == 503
    assert ask(Replicas(), "/health", None).status_code == 503


def test_orders_go_to_all_replicas() -> None:
    apps = {name: application() for name in "ab"}
    assert ask(Replicas(**apps), "/flush_prefix_cache", {}).status_code == 200
    assert [app.state.models.first.client.num_flushes for app in apps.values()] == [1, 1]


def test_a_kept_response_is_found_wherever_it_is() -> None:
    replicas = Replicas(a=chat_application(), b=chat_application())
    replicas.dying = {"a": 0}
    made = ask(replicas, "/v1/responses", {"input": "Hello."}).json()
    replicas.dying, replicas.asked = {}, []
    assert ask(replicas, f"/v1/responses/{made['id']}", None).json() == made
    assert replicas.asked == ["a", "b"]
    replicas.asked = []
    more = {"input": "And then?", "previous_response_id": made["id"]}
    assert ask(replicas, "/v1/responses", more).status_code == 200
    assert replicas.asked == ["a", "b"]
    lost = ask(replicas, "/v1/responses", {**more, "previous_response_id": "resp_none"})
    assert lost.status_code == 400
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens"):
        replicas.asked = []
        assert ask(replicas, path, more).status_code == 200
        assert replicas.asked == ["a", "b"]
    replicas.asked = []
    said = ask(replicas, f"/v1/responses/{made['id']}/cancel", {}).text
    assert "not kept here" not in said
    assert replicas.asked == ["a", "b"]


def test_metrics_are_those_of_all() -> None:
    page = ask(Replicas(a=application(), b=application()), "/metrics", None).text
    assert 'replica="a"' in page
    assert 'replica="b"' in page


def test_keys_are_asked_for_by_the_replicas() -> None:
    replicas = Replicas(a=application(api_keys=("k",)))
    for path in ("/metrics", "/v1/models"):
        assert ask(replicas, path, None).status_code == 401


def test_an_answer_that_takes_too_long_is_an_error() -> None:
    slow = application(FakeEngine(seconds_per_token=3600))
    response = ask(Replicas(a=slow), request_timeout=0.05)
    assert response.status_code == 504
    assert json.loads(response.text)["error"]["code"] == "request_timeout"


def test_where_no_replica_comes_the_client_is_told_when_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingress, "_ABSENT_SECONDS", 0.1)
    response = ask(Replicas())
    assert response.status_code == 503
    assert json.loads(response.text)["error"]["code"] == "starting"
    assert int(response.headers["retry-after"]) >= 1
