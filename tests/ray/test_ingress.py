"""What the ingress does when replicas refuse, die or know nothing of what is asked, without Ray
running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="replicas need Ray Serve: pip install 'paceline[ray]'")

from ray.exceptions import ActorDiedError

from paceline.ray.calls import Call, answered, whole_answer
from paceline.ray.ingress import Ingress
from paceline.server.config import ServerConfig
from tests.server.asgi import application, events
from tests.server.chats import chat_tokenizer
from tests.server.fakes import FakeEngine

PROMPT = {"prompt": "Once"}


class Answer:
    """A response of Serve's handle, of one replica."""

    def __init__(self, engines: Engines, name: str, call: Call) -> None:
        self._engines, self._name, self._call = engines, name, call
        self.was_cancelled = False

    async def __aiter__(self) -> AsyncIterator[tuple[str, int, list[Any]]]:
        engines = self._engines
        engines.asked.append(self._name)
        num_parts = 0
        async for messages in answered(engines.apps[self._name], self._call):
            if engines.dying.get(self._name) == num_parts:
                raise ActorDiedError
            num_parts += 1
            yield self._name, len(engines.apps), messages

    def cancel(self) -> None:
        self.was_cancelled = True


class Engines:
    """Serve's handle of the replicas; requests go to the first one that is not to be avoided.

    Attributes:
        dying: by name, after how many parts of an answer a replica dies.
        asked: names of the replicas, in the order in which they were asked.
    """

    def __init__(self, **apps: Any) -> None:
        self.apps = apps
        self.dying: dict[str, int] = {}
        self.asked: list[str] = []
        self.answer = self

    def options(self, stream: bool) -> Engines:
        return self

    def remote(self, call: Call) -> Answer:
        dead = {name for name in self.asked if name in self.dying}
        left = [name for name in self.apps if name not in call.avoid | dead]
        return Answer(self, left[0] if left else "b", call)

    def broadcast(self, method: str, call: Call) -> Engines:
        assert method == "whole_answer"
        self._call = call
        return self

    async def results_async(self, **options: Any) -> list[Any]:
        answers = [(n, await whole_answer(app, self._call)) for n, app in self.apps.items()]
        return [*answers, ActorDiedError()]


def ask(
    engines: Engines, path: str = "/v1/completions", body: Any = PROMPT, **config: Any
) -> httpx.Response:
    ingress = Ingress(engines, ServerConfig(**config))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (await ingress(None))(scope, receive, send)

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
    engines = Engines(a=full, b=application())
    assert text_of(ask(engines))
    assert engines.asked == ["a", "b"]


def test_where_all_refuse_the_client_is_told_when_to_come_back() -> None:
    apps = [application(FakeEngine()) for _ in range(2)]
    for app in apps:
        app.state.models.first.admission.num_unfinished = 10**6
    response = ask(Engines(a=apps[0], b=apps[1]))
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_death_before_the_first_byte_is_not_seen(stream: bool) -> None:
    engines = Engines(a=application(), b=application())
    engines.dying = {"a": 0}
    response = ask(engines, body={**PROMPT, "stream": stream})
    assert response.status_code == 200
    assert engines.asked == ["a", "b"]


def test_an_engine_that_died_before_the_first_byte_is_not_seen() -> None:
    engines = Engines(a=application(FakeEngine(dies_at=0)), b=application())
    engines.dying = {"a": 99}
    assert text_of(ask(engines))
    assert engines.asked == ["a", "b"]


def test_a_request_kills_two_replicas_at_most() -> None:
    engines = Engines(**{name: application() for name in "abc"})
    engines.dying = dict.fromkeys("abc", 0)
    response = ask(engines)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_dead"
    assert engines.asked == ["a", "b"]


def test_a_stream_whose_replica_dies_ends_with_an_error() -> None:
    engines = Engines(a=application(FakeEngine(seconds_per_token=0.01)), b=application())
    engines.dying = {"a": 2}
    *told, last = events(ask(engines, body={**PROMPT, "stream": True}).text)
    assert told
    assert last["error"]["code"] == "engine_dead"
    assert engines.asked == ["a"]


def test_health_is_that_of_the_best() -> None:
    draining, ready = application(), application()
    draining.state.models.drain()
    assert ask(Engines(a=draining, b=ready), "/health", None).status_code == 200
    assert ask(Engines(a=draining, b=draining), "/health", None).status_code == 503
    assert ask(Engines(), "/health", None).status_code == 503


def test_orders_go_to_all_replicas() -> None:
    apps = {name: application() for name in "ab"}
    assert ask(Engines(**apps), "/flush_prefix_cache", {}).status_code == 200
    assert [app.state.models.first.client.num_flushes for app in apps.values()] == [1, 1]


def test_a_kept_response_is_found_wherever_it_is() -> None:
    engines = Engines(a=chat_application(), b=chat_application())
    engines.dying = {"a": 0}
    made = ask(engines, "/v1/responses", {"input": "Hello."}).json()
    engines.dying, engines.asked = {}, []
    assert ask(engines, f"/v1/responses/{made['id']}", None).json() == made
    more = {"input": "And then?", "previous_response_id": made["id"]}
    assert ask(engines, "/v1/responses", more).status_code == 200
    assert engines.asked == ["a", "b"]
    lost = ask(engines, "/v1/responses", {**more, "previous_response_id": "resp_none"})
    assert lost.status_code == 400
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens"):
        engines.asked = []
        assert ask(engines, path, more).status_code == 200
        assert engines.asked == ["a", "b"]
    engines.asked = []
    said = ask(engines, f"/v1/responses/{made['id']}/cancel", {}).text
    assert "not kept here" not in said
    assert engines.asked == ["a", "b"]


def test_metrics_are_those_of_all() -> None:
    page = ask(Engines(a=application(), b=application()), "/metrics", None).text
    assert 'replica="a"' in page
    assert 'replica="b"' in page


def test_keys_are_asked_for_by_the_replicas() -> None:
    engines = Engines(a=application(api_keys=("k",)))
    for path in ("/metrics", "/v1/models"):
        assert ask(engines, path, None).status_code == 401


def test_an_answer_that_takes_too_long_is_an_error() -> None:
    slow = application(FakeEngine(seconds_per_token=3600))
    response = ask(Engines(a=slow), request_timeout=0.05)
    assert response.status_code == 504
    assert json.loads(response.text)["error"]["code"] == "request_timeout"
