"""Requests answered from their bytes, how broken answers end, and the metrics of all replicas."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from paceline.errors import EngineDeadError
from paceline.ray.calls import Call, answered, body_of, read_body, status_of, whole_answer
from paceline.ray.failures import last_words, refusal
from paceline.ray.metrics import merged
from paceline.ray.prompts import Traits
from tests.server.asgi import application, call, complete, engine_of
from tests.server.fakes import FakeEngine
from tests.server.test_metrics import samples, value


def call_of(path: str = "/v1/completions", is_whole: bool = True, **body: Any) -> Call:
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "app": object(),  # what a server adds and cannot be sent
    }
    return Call.of(scope, json.dumps({"prompt": "Once", **body}).encode(), is_whole, Traits())


def test_an_answer_is_the_applications() -> None:
    app = application()
    messages = asyncio.run(whole_answer(app, call_of()))
    assert status_of(messages) == 200
    told = json.loads(body_of(messages))
    assert told["choices"] == complete(application())["choices"]


def test_a_stream_comes_in_parts() -> None:
    async def story() -> None:
        engine = FakeEngine(seconds_per_token=0.005)
        async with aclosing(answered(application(engine), call_of(stream=True))) as parts:
            found = [part async for part in parts]
        assert len(found) > 2
        assert body_of([m for part in found for m in part]).endswith(b"data: [DONE]\n\n")

    asyncio.run(story())


def test_a_client_that_leaves_ends_its_request() -> None:
    async def story() -> None:
        app = application(FakeEngine(seconds_per_token=0.01))
        async with aclosing(answered(app, call_of(stream=True))) as parts:
            await anext(parts)
        (asked,) = engine_of(app).calls
        assert asked.aborted
        assert app.state.models.num_unfinished == 0

    asyncio.run(story())


def test_a_body_that_came_too_slowly_is_refused_as_ever() -> None:
    messages = asyncio.run(whole_answer(application(), call_of(is_whole=False)))
    assert status_of(messages) == 408


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"ab", b"c"], (b"abc", True)),
        ([b"abcdefgh", b"more", b"never read"], (b"abcdefghmore", True)),
        ([b"ab", None], None),
    ],
)
def test_bodies_are_read_to_a_limit(parts: list[bytes | None], expected: Any) -> None:
    messages = [
        {"type": "http.disconnect"}
        if part is None
        else {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    assert asyncio.run(read_body(receive, 10, 60.0)) == expected


def test_a_body_that_does_not_arrive_is_told_apart() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    assert asyncio.run(read_body(receive, 10, 0.01)) == (b"", False)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", b'"code":"engine_dead"}}\n\ndata: [DONE]\n\n'),
        ("/v1/messages", b"event: error\ndata: "),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":"engine_dead"'),
        ("/api/chat", b'{"error":"it died"}\n'),
    ],
)
def test_a_broken_stream_ends_as_its_api_says(path: str, expected: bytes) -> None:
    assert expected in last_words(path, EngineDeadError("it died"))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/completions", {"message": "it died", "type": "server_error"}),
        ("/v1/messages", {"message": "it died", "type": "api_error"}),
        ("/api/chat", "it died"),
    ],
)
def test_a_request_without_an_answer_gets_an_error(path: str, expected: Any) -> None:
    response = refusal(path, EngineDeadError("it died"))
    told = json.loads(bytes(response.body))["error"]
    assert response.status_code == 500
    assert told == expected or expected.items() <= told.items()


def test_metrics_say_whose_they_are() -> None:
    app = application()
    complete(app)
    page = call(app, "GET", "/metrics").text
    found = samples(merged({"0": page, "1": page}))
    for replica in ("0", "1"):
        labels = {"finished_reason": "stop", "replica": replica}
        assert value(found, "paceline:request_success_total", **labels) == 1
    assert len(found) == 2 * len(samples(page.encode()))
