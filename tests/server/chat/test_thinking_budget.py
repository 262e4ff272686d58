"""Budgets of thoughts by the names of all protocols, and where there are none."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.request.structured_outputs import StructuredOutputs
from tests.server.chats import CHATML, HARMONY_CHAT, THINKING, USER, ChatServer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SHAPE = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}


def asked(body: dict[str, Any], template: str = THINKING) -> StructuredOutputs | None:
    """What the engine is asked for."""
    server = ChatServer("<think>Hm.</think>Yes.", template)
    status, told = server.post([USER], **body)
    assert status == 200, told
    return server.engine.calls[0].params.structured_outputs


def budget(found: StructuredOutputs | None) -> int | None:
    return found.after.budget if found is not None and found.after is not None else None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"thinking_token_budget": 5}, 5),  # as vLLM has it
        ({"thinking_token_budget": 0}, 0),
        ({"reasoning_budget_tokens": 6}, 6),  # llama.cpp b11549, tools/server
        ({"thinking_budget_tokens": 7.0}, 7),
        ({"thinking_token_budget": -1}, None),
        ({"thinking_token_budget": None}, None),
        ({"thinking_token_budget": 9, "max_tokens": 9}, None),  # max_tokens ends them before
        ({"thinking_token_budget": 8, "max_tokens": 9}, 8),
        ({}, None),
    ],
)
def test_chats(body: dict[str, Any], expected: int | None) -> None:
    found = asked(body)
    assert budget(found) == expected
    assert found is None or found.free


def test_a_shape_holds_besides() -> None:
    found = asked({"thinking_token_budget": 5, **SHAPE})
    assert budget(found) == 5
    assert found is not None
    assert found.kind == "json"


@pytest.mark.parametrize("template", [CHATML, HARMONY_CHAT])
def test_without_thoughts_or_in_harmony_it_has_no_effect(template: str) -> None:
    assert asked({"thinking_token_budget": 5}, template) is None


def test_anthropics_budget() -> None:
    server = ChatServer("<think>Hm.</think>Yes.", THINKING)
    body = {"model": "fake", "messages": [USER], "max_tokens": 2000}
    for thinking, expected in (
        ({"type": "enabled", "budget_tokens": 1024}, 1024),
        ({"type": "enabled", "budget_tokens": 4096}, None),
        ({"type": "adaptive"}, None),
    ):
        response = server.http.post("/v1/messages", json={**body, "thinking": thinking})
        assert response.status_code == 200, response.text
        assert budget(server.engine.calls[-1].params.structured_outputs) == expected
    wrong = {"type": "enabled", "budget_tokens": -1}
    response = server.http.post("/v1/messages", json={**body, "thinking": wrong})
    assert response.status_code == 400
    assert "thinking.budget_tokens is -1" in response.json()["error"]["message"]


def test_what_is_wrong_is_named() -> None:
    status, told = ChatServer("Yes.", THINKING).post([USER], thinking_token_budget=-2)
    assert (status, told["error"]["param"]) == (400, "thinking_token_budget")
    response = ChatServer().http.post(
        "/v1/completions", json={"prompt": "a", "thinking_token_budget": 5}
    )
    assert response.status_code == 400
    assert "send a chat" in response.json()["error"]["message"]
