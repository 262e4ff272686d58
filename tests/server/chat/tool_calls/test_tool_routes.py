"""Calls in the format of every family come out of every API beside chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.chat.tool_calls.tool_samples import CALLS, SAMPLES, SCHEMAS
from tests.server.chats import ChatServer

USER = [{"role": "user", "content": "How is it?"}]
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]

Calls = list[tuple[str, Any]]


def responses(post: Callable[..., Any]) -> Calls:
    flat = [{"type": "function", **function} for function in FUNCTIONS]
    output = post("/v1/responses", input="How is it?", tools=flat)["output"]
    called = [each for each in output if each["type"] == "function_call"]
    return [(each["name"], json.loads(each["arguments"])) for each in called]


def messages(post: Callable[..., Any]) -> Calls:
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    content = post("/v1/messages", messages=USER, tools=tools, max_tokens=999)["content"]
    return [(each["name"], each["input"]) for each in content if each["type"] == "tool_use"]


def ollama(post: Callable[..., Any]) -> Calls:
    message = post("/api/chat", messages=USER, tools=TOOLS, stream=False)["message"]
    called = [call["function"] for call in message["tool_calls"]]
    return [(each["name"], each["arguments"]) for each in called]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("route", [responses, messages, ollama])
def test_every_route_tells_the_calls(name: str, route: Callable[..., Calls]) -> None:
    server = ChatServer(SAMPLES[name], tool_call_parser=name)

    def post(path: str, **fields: Any) -> Any:
        response = server.http.post(path, json={"model": server.engine.info.model, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    assert route(post) == CALLS
