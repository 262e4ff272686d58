"""Grammars of forced and strict tool calls and of response formats, as llguidance reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.chats import (
    ADD,
    ADD_TOOL,
    CHATML,
    LLAMA_CHAT,
    THINKING,
    TOOLS,
    WEATHER,
    WEATHER_TOOL,
    ChatServer,
)
from tests.server.grammars import close, matches


@pytest.fixture(scope="module", autouse=True)
def compiler_ends() -> Iterator[None]:
    yield
    close()


def grammar_of(template: str = CHATML, **fields: Any) -> Any:
    server = ChatServer(template=template)
    status, body = server.post(**fields)
    assert status == 200, body
    return server.grammar


OTHER = WEATHER.replace("city", "town")
L_WEATHER = '{"name": "weather", "parameters": {"city": "Rome"}}'
L_ADD = '{"name": "add", "parameters": {}}'
STRICT = [{"type": "function", "function": {**WEATHER_TOOL["function"], "strict": True}}, ADD_TOOL]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAG = {"type": "tag", "begin": "<n>", "content": INTEGER, "end": "</n>"}
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"tools": TOOLS, "tool_choice": "required"},
            [WEATHER, ADD, f"{WEATHER}\n{ADD}"],
            [OTHER, "", "Hm.", f"Hm.{WEATHER}", WEATHER.replace("weather", "rm")],
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            [WEATHER],
            [f"{WEATHER}\n{ADD}"],
        ),
        ({"tools": TOOLS, "tool_choice": NAMED}, [ADD], [WEATHER, f"{ADD}\n{ADD}"]),
        (
            {"tools": STRICT},
            ["", "Hm. <b>", WEATHER, f"Hm.\n{WEATHER}{ADD} So.", ADD],
            [OTHER, f"Hm. {OTHER}", "<tool_call>\nwhat"],
        ),
        ({"tools": STRICT, "response_format": FORMAT}, ['{"a": 1}', WEATHER], ["Hm.", OTHER]),
        ({"response_format": FORMAT}, ['{"a": 1}'], ['{"a": "x"}', "Hm."]),
        ({"tools": TOOLS, "structured_outputs": {"choice": ["a/b", "c"]}}, ["a/b", ADD], ["a"]),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a/b|\\/+"}}, ["a/b", "//"], ["a"]),
        ({"tools": TOOLS, "grammar": 'root ::= "a" | "b" root'}, ["ba", ADD], ["b", "Hm."]),
        ({"tools": TOOLS, "structured_outputs": {"grammar": 'start: "a"+'}}, ["aa", ADD], ["b"]),
        ({"tools": TOOLS, "structural_tag": {"format": TAG}}, ["<n>1</n>", ADD], ["<n>x</n>"]),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, ["<n>1</n>"], ["1", ADD]),
        (
            {"template": LLAMA_CHAT, "tools": TOOLS, "tool_choice": "required"},
            [L_WEATHER, f"{L_WEATHER}; {L_ADD}"],
            ["Hm.", WEATHER, L_WEATHER.replace("city", "town")],
        ),
        (
            {"template": LLAMA_CHAT, "tools": STRICT},
            ["", "Hm. {", L_WEATHER, f"{L_WEATHER}; {L_ADD}"],
            [L_WEATHER.replace("city", "town"), '{"a": 1}'],
        ),
        (
            {"template": THINKING, "response_format": FORMAT},
            ['{"a": 1}', '<think>\nHm. <b> { é\n</think>\n\n{"a": 1}'],
            ["<think>Hm.</think>Yes.", 'Hm.</think>{"a": 1}', '\n{"a": 1}'],
        ),
        (
            {
                "template": THINKING,
                "response_format": {"type": "json_object"},
                "chat_template_kwargs": {"open_thoughts": True},
            },
            ['Hm. <\n</think>\n{"b": 1}', '</think>{"b": 1}'],
            ['{"b": 1}', "Hm.</think>[1]"],
        ),
        (
            {"template": THINKING, "tools": TOOLS, "tool_choice": "required"},
            [WEATHER, f"<think>Hm.</think>\n\n{WEATHER}"],
            [f"<think>Hm.{WEATHER}"],
        ),
    ],
)  # fmt: skip
def test_grammars(fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(**fields)
    assert [text for text in good if not matches(grammar, text)] == []
    assert [text for text in bad if matches(grammar, text)] == []


def test_json_is_written_in_one_style() -> None:
    """Whether a schema is the whole grammar or a part of one."""
    composed = grammar_of(tools=TOOLS, structured_outputs={"json": "true"})
    assert matches(composed, '{"a": [1, 2]}')
    assert not matches(grammar_of(tools=TOOLS, response_format=FORMAT), '{"a":1}')


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, None),
        ({"tools": TOOLS}, None),
        ({"tools": STRICT, "tool_choice": "none"}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json"),
        ({"response_format": FORMAT}, "json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar"),
    ],
)
def test_what_needs_no_composed_grammar_has_none(fields: dict[str, Any], kind: str | None) -> None:
    """So that plain requests stay plain, and equal schemas are compiled once."""
    grammar = grammar_of(**fields)
    assert (grammar and grammar.kind) == kind


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [ADD_TOOL, ADD_TOOL]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "tool_choice",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}
                ]
            },
            "tools.0.function.parameters",
        ),
        (
            {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"description": "x" * (1 << 16)}},
                }
            },
            "response_format",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    status, body = ChatServer().post(**fields)
    assert status == 400, body
    assert body["error"]["param"] == param, body
