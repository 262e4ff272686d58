"""Errors of every status in the form of the API that was asked."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.server.http.errors import ApiError
from paceline.server.http.security import body_too_slow
from tests.server.asgi import application, call
from tests.server.chats import ChatServer

MESSAGES = [{"role": "user", "content": "Once"}]
BODY = {"model": "fake", "messages": MESSAGES, "stream": False}
OPENAI, ANTHROPIC, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's names: those of its documentation, whatever else is the client's fault or ours."""


def message_of(path: str, status: int, document: Any) -> str:
    """What an error says; its form must be that of the path's API."""
    if path.startswith("/api/"):
        assert set(document) == {"error"}
        return document["error"]
    if path.startswith("/v1/messages"):
        assert set(document) == {"type", "error", "request_id"}
        assert document["type"] == "error"
        assert set(document["error"]) == {"type", "message"}
        assert document["error"]["type"] == TYPES[status]
    else:
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}
    return document["error"]["message"]


def body_of(path: str) -> dict[str, Any]:
    return {**BODY, "max_tokens": 9} if path == ANTHROPIC else dict(BODY)


CALLS: tuple[tuple[int, dict[str, Any], dict[str, Any]], ...] = (
    (400, {}, {"content": b"{"}),
    (401, {"api_keys": ("right",)}, {"headers": {"x-api-key": "wrong"}}),
    (403, {}, {"headers": {"host": "other.example"}}),
    (404, {}, {"model": "claude"}),
    (405, {}, {"method": "PUT"}),
    (413, {"max_body_bytes": 10}, {}),
    (415, {}, {"headers": {"content-type": "text/plain"}}),
)


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC, f"{ANTHROPIC}/count_tokens", OLLAMA])
def test_refusals_have_the_form_of_the_api(path: str) -> None:
    for status, config, change in CALLS:
        options = {"method": "POST", "path": path, "json": body_of(path), **change}
        if "model" in change:
            options["json"]["model"] = options.pop("model")
        if "content" in change:
            del options["json"]
            options["headers"] = {"content-type": "application/json"}
        response = call(application(**config), **options)
        assert response.status_code == status, response.text
        assert message_of(path, status, response.json())
        if path.startswith(ANTHROPIC):
            assert response.json()["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC, OLLAMA])
def test_failures_have_the_form_of_the_api(path: str) -> None:
    for status, error in (500, RuntimeError("out of luck")), (503, ApiError(503, "a")):
        server = ChatServer()
        server.engine.error_at = (1, error)
        response = server.http.post(path, json=body_of(path))
        assert response.status_code == status, response.text
        assert message_of(path, status, response.json())
        assert "out of luck" not in response.text


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC, OLLAMA])
def test_all_statuses_have_the_form_of_the_api(path: str) -> None:
    late = body_too_slow(2)
    assert message_of(path, 408, late.body(path)) == "the body took longer than 2 s to arrive"
    for status in TYPES:
        assert message_of(path, status, ApiError(status, "words").body(path)) == "words"


def test_paths_that_do_not_exist_have_a_form_too() -> None:
    for path in ("/v1/nothing", "/v1/messages/batches", "/api/nothing"):
        response = call(application(), "GET", path)
        assert response.status_code == 404
        assert path in message_of(path, 404, response.json())
