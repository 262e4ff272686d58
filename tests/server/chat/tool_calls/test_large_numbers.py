"""Numbers in calls that no double holds: what clients and templates get of them is JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from paceline.server.chat.tool_calls.values import values_of
from tests.server.chats import CHATML, USER, ChatServer
from tests.server.protocols import Asked

LARGEST = sys.float_info.max
CALLS = {
    "pythonic": "[get(city=%s, b=2)]",
    "hermes": '<tool_call>\n{"name": "get", "arguments": {"city": %s, "b": 2}}\n</tool_call>',
    "gemma4": "<|tool_call>call:get{city:%s,b:2}<tool_call|>",
}
REVERSED = '<tool_call>\n{"arguments": {"city": %s, "b": 2}, "name": "get"}\n</tool_call>'


def refuse(constant: str) -> Any:
    raise AssertionError(constant)


def strictly(text: str) -> Any:
    """As readers do that know JSON alone."""
    return json.loads(text, parse_constant=refuse)


def arguments_of(protocol: str, form: str, call: str, streams: bool = False) -> Any:
    asked = Asked(call, CHATML, tool_call_parser=form)
    told = asyncio.run(asked.told(protocol, streams))
    if protocol == "chat":
        return told["message"]["tool_calls"][0]["function"]["arguments"]
    if protocol == "responses":
        return told["output"][0]["arguments"]
    if protocol == "messages":
        return told["content"][0]["input"]
    return told["message"]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("form", CALLS)
def test_a_call_as_a_text_has_what_the_model_wrote(form: str) -> None:
    for protocol in ("chat", "responses"):
        text = arguments_of(protocol, form, CALLS[form] % "-1e505")
        assert text == '{"city": -1e505, "b": 2}'
        assert strictly(text)["b"] == 2


@pytest.mark.parametrize("number", ["1e505", "9" * 400])
@pytest.mark.parametrize("form", CALLS)
def test_a_call_as_an_object_has_the_largest_number(form: str, number: str) -> None:
    for protocol in ("messages", "ollama"):
        assert arguments_of(protocol, form, CALLS[form] % number) == {"city": LARGEST, "b": 2}
    assert arguments_of("ollama", form, CALLS[form] % number, True) == {"city": LARGEST, "b": 2}


@pytest.mark.parametrize("number", ["1e505", "9" * 400, "Infinity"])
def test_a_call_whose_name_comes_last(number: str) -> None:
    text = arguments_of("chat", "hermes", REVERSED % number)
    assert strictly(text) == {"city": LARGEST, "b": 2}


def test_an_earlier_call_in_a_template() -> None:
    template = CHATML.replace("{{ message['content'] }}", "{{ message.tool_calls | tojson }}")
    server = ChatServer("Yes.", template)
    function = {"name": "get", "arguments": '{"city": 1e505}'}
    call = {"id": "call_1", "type": "function", "function": function}
    assert server.post([USER, {"role": "assistant", "tool_calls": [call]}, USER])[0] == 200
    assert "Infinity" not in server.prompt


def test_what_is_said_otherwise_stays() -> None:
    text = '{"a": [1, -2.5, 1e308, "1e505", null, true], "b": {"c": 12345678901234567890}}'
    assert values_of(text) == json.loads(text)
    assert values_of("[NaN, -Infinity]") == [None, -LARGEST]
    assert values_of("9" * 5000) == LARGEST  # more digits than Python reads as one number
