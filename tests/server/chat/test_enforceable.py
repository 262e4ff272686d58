"""What of a JSON schema becomes an annotation, held against the compiler; and who is told."""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any, Literal
from uuid import UUID

import pydantic
import pytest

from paceline.json_schema.enforceable import (
    FORMATS,
    UNENFORCED,
    enforceable,
    is_supported_pattern,
)
from paceline.structured.lark import tag_grammar
from tests.server.chats import USER, WEATHER, ChatServer

HEADER = "x-paceline-unenforced-schema-keywords"
OBJECT = {"type": "object"}
ARGUMENTS: dict[str, Any] = {
    "uniqueItems": True,
    "minContains": 1,
    "maxContains": 1,
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
}


def problem(schema: Any) -> str:
    """What the compiler has against a schema; empty if it takes it."""
    matcher = pytest.importorskip("llguidance").LLMatcher
    return matcher.validate_grammar(matcher.grammar_from_json_schema(json.dumps(schema)), None)


@pytest.mark.parametrize("keyword", sorted(UNENFORCED))
def test_keywords_that_the_compiler_refuses_are_left_out(keyword: str) -> None:
    schema = {"properties": {"a": {keyword: ARGUMENTS.get(keyword, {"type": "string"})}}}
    assert keyword in problem(schema)
    found = enforceable(schema)
    assert found.unenforced == (keyword,)
    assert found.schema == {"properties": {"a": {}}}
    assert problem(found.schema) == ""


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_the_compiler_knows_stay(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert problem(schema) == ""
    assert enforceable(schema).schema == schema


@pytest.mark.parametrize("name", ["path", "binary", "password", "regex", "iri", "json-pointer"])
def test_other_formats_are_annotations(name: str) -> None:
    schema = {"type": ["string", "null"], "format": name}
    assert problem(schema) != ""
    assert enforceable(schema).unenforced == ("format",)
    number = {"type": "integer", "format": "int32"}
    assert enforceable(number).schema == number


@pytest.mark.parametrize(
    ("pattern", "supported"),
    [
        (r"^\d{4}-\d{2}$", True),
        (r"^[\w\-.]+@[^\s]+$", True),
        (r"^a|b$", True),
        (r"(^a|b$)", True),
        (r"^(?:a|b)+?$", True),
        (r"[$^]+", True),
        (r"[^$]", True),
        (r"\$\^", True),
        (r"\p{L}+\/", True),
        (r"\bword\b", False),
        (r"\Bx", False),
        (r"^(?=.*\d).+$", False),
        (r"^(?!x).+$", False),
        (r"(?<=a)b", False),
        (r"(?<!a)b", False),
        (r"(a)\1", False),
        (r"a^b", False),
        (r"a$b", False),
        (r"\cA", False),
        (r"[\b]", False),
    ],
)
def test_patterns_that_look_around_are_annotations(pattern: str, supported: bool) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert (problem(schema) == "") is supported
    assert is_supported_pattern(pattern) is supported
    found = enforceable(schema)
    assert found.unenforced == (() if supported else ("pattern",))
    assert problem(found.schema) == ""


@pytest.mark.parametrize(
    ("schema", "unenforced"),
    [
        ({**OBJECT, "minProperties": 1, "properties": {"a": {}}}, ("minProperties",)),
        ({**OBJECT, "minProperties": 1}, ()),
        ({**OBJECT, "maxProperties": 2, "properties": {"a": {}}, "required": ["a"]}, ()),
        ({**OBJECT, "patternProperties": {r"\ba": {}, "^b": {}}, "additionalProperties": False},
         ("patternProperties",)),
        ({**OBJECT, "patternProperties": {r"\ba": {}}, "additionalProperties": {"type": "null"}},
         ("patternProperties",)),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("oneOf",)),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ()),
        ({"oneOf": [OBJECT, {"type": "null"}], "anyOf": [OBJECT, {"type": "string"}]}, ()),
        ({"type": "array", "uniqueItems": False, "items": {"type": "string"}}, ()),
        ({"enum": [{"uniqueItems": True}, "\\b"]}, ()),
        ({**OBJECT, "properties": {"format": {"type": "string"}, "not": {}}}, ()),
        ({**OBJECT, "x-order": 3, "discriminator": {"propertyName": "a"}, "nullable": True}, ()),
    ],
)  # fmt: skip
def test_what_is_left_the_compiler_takes(schema: Any, unenforced: tuple[str, ...]) -> None:
    found = enforceable(schema)
    assert found.unenforced == unenforced
    assert problem(found.schema) == ""


def test_what_is_malformed_is_the_compilers_to_refuse() -> None:
    for schema in ({"properties": [], "items": 3, "oneOf": 5, "format": 7}, {"type": "foo"}, 3):
        assert enforceable(schema).schema == schema


class Kind(enum.Enum):
    CAT = "cat"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pydantic.Field(ge=0, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    tags: set[str]


class Owner(pydantic.BaseModel):
    """As ordinary code writes it."""

    id: UUID
    home: pydantic.FilePath
    name: Annotated[str, pydantic.Field(pattern=r"^\w+\b")]
    pets: list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]]
    best: Kind | None = None


MCP = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "path": {"type": "string", "format": "uri-reference"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "mode": {"type": "string", "default": "read"},
    },
    "required": ["path", "tags"],
    "if": {"properties": {"mode": {"const": "write"}}},
    "then": {"required": ["text"]},
    "additionalProperties": False,
}


def wish(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def tool(schema: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "parameters": schema, **more}}]


def test_a_pydantic_schema_is_served_and_told_of() -> None:
    server = ChatServer()
    body = {"messages": [USER], "response_format": wish(Owner.model_json_schema())}
    for stream in (False, True):
        response = server.http.post("/v1/chat/completions", json={**body, "stream": stream})
        assert response.status_code == 200, response.text
        assert response.headers[HEADER] == "format, pattern, uniqueItems"
    assert problem(json.loads(server.grammar.source)) == ""
    plain = server.http.post("/v1/chat/completions", json={"messages": [USER]})
    assert HEADER not in plain.headers
    enforced = {**body, "response_format": wish(Cat.model_json_schema(), strict=True)}
    response = server.http.post("/v1/chat/completions", json=enforced)
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers


def test_an_mcp_tool_is_served_and_told_of_where_it_holds() -> None:
    server = ChatServer(WEATHER)
    body = {"messages": [USER], "tools": tool(MCP), "tool_choice": "required"}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "format, if, then, uniqueItems"
    matcher = pytest.importorskip("llguidance").LLMatcher
    assert matcher.validate_grammar(tag_grammar(server.grammar.source), None) == ""
    body = {"messages": [USER], "tools": tool(MCP)}  # nothing of it is to be enforced
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers


def test_what_only_the_format_of_the_calls_leaves_out_is_told_of() -> None:
    server = ChatServer(tool_call_parser="qwen3_coder")
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "ipv6"}}}
    body = {"messages": [USER], "tools": tool(schema), "tool_choice": "required"}
    response = server.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.headers[HEADER]) == (200, "format")
    status, answer = server.post(tools=tool(schema, strict=True))
    assert (status, answer["error"]["param"]) == (400, "tools.0.function.parameters")
    assert ChatServer().post(tools=tool(schema, strict=True))[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": wish(MCP, strict=True)}, "response_format"),
        ({"tools": tool(MCP, strict=True)}, "tools.0.function.parameters"),
        (
            {"tools": tool(MCP, strict=True), "tool_choice": "required"},
            "tools.0.function.parameters",
        ),
    ],
)
def test_strict_is_taken_at_its_word(fields: dict[str, Any], param: str) -> None:
    status, body = ChatServer().post(**fields)
    assert (status, body["error"]["param"]) == (400, param)
    said = f"{param} is strict, and format, if, then, uniqueItems cannot be enforced"
    assert body["error"]["message"].startswith(said)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": wish({"$ref": "#"})}, "response_format"),
        (
            {
                "tools": tool({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
                "tool_choice": "required",
            },
            "tools.0.function.parameters",
        ),
    ],
)
def test_references_without_end_are_refused(fields: dict[str, Any], param: str) -> None:
    status, body = ChatServer().post(**fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert "'#' leads back to itself" in body["error"]["message"]


def test_a_schema_that_is_made_to_be_slow_is_not() -> None:
    """Each of these would take hours if all that might be compared were."""
    names = [f"p{i}" for i in range(500)]
    both = {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#/$defs/a"}}
    tree = {"type": "object", "properties": both, "required": ["x", "y"]}
    wide = {"properties": {key: {"enum": names} for key in names}, "required": names}
    for branch in (tree, wide):
        schema = {"oneOf": [{"$ref": "#/$defs/a"}] * 64, "$defs": {"a": branch}}
        many = {**schema, "properties": {str(i): {"oneOf": schema["oneOf"]} for i in range(60)}}
        assert enforceable(many).unenforced == ("oneOf",)
    assert is_supported_pattern("(^" * 30_000)


@pytest.mark.parametrize("others", [False, True, {"type": "integer"}])
def test_names_whose_pattern_is_dropped_are_none_of_the_others(others: Any) -> None:
    """What matches the schema that was given must match what is left."""
    text = {"type": "string"}
    schema = {"type": "object", "patternProperties": {"^b": text, r"\ba": text}}
    left = {"type": "object", "patternProperties": {"^b": text}}
    assert enforceable({**schema, "additionalProperties": others}).schema == left
    assert enforceable({**left, "additionalProperties": others}).schema == {
        **left,
        "additionalProperties": others,
    }
