"""Requests as bytes, how broken answers end, and the metrics of all replicas."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from paceline.core.errors import EngineDeadError
from paceline.ray.ingress import merged
from paceline.ray.links import ReplicaCall, last_words, read_body, refusal
from tests.server.asgi import application, call, complete
from tests.server.metrics.test_server_metrics import samples, value


def test_a_call_is_written_without_what_concerns_the_clients_connection() -> None:
    scope = {
        "method": "POST",
        "path": "/api/a b",
        "root_path": "/api",
        "raw_path": b"/api/a%20b",
        "query_string": b"c=d",
        "headers": [
            (b"host", b"localhost"),
            (b"connection", b"close"),
            (b"content-length", b"99"),
            (b"x-request-id", b"theirs"),
        ],
    }
    call = ReplicaCall.of(scope, b"body")
    assert call.path == "/a b"
    assert call.encoded([(b"x-request-id", b"ours")]) == (
        b"POST /a%20b?c=d HTTP/1.1\r\nhost: localhost\r\nx-request-id: ours\r\n"
        b"content-length: 4\r\n\r\nbody"
    )


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"ab", b"c"], b"abc"),
        ([b"abcdefgh", b"more", b"never read"], b"abcdefghmore"),
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

    with pytest.raises(TimeoutError):
        asyncio.run(read_body(receive, 10, 0.01))


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
