"""The normal form of schemas: closed objects, plain references, the words of JSON Schema alone."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.json_schema.normal_form import in_plain_words, normal_form, with_closed_objects

A = {"properties": {"a": {"type": "null"}}}
B = {"properties": {"b": {"type": "null"}}}
CLOSED = {"additionalProperties": False}
A_CLOSED = {**A, **CLOSED}
BOTH = {"a": {"type": "null"}, "b": True}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, A_CLOSED),
        ({"properties": {}}, {"properties": {}, **CLOSED}),
        ({"items": A}, {"items": A_CLOSED}),
        ({"properties": {"o": A}}, {"properties": {"o": A_CLOSED}, **CLOSED}),
        ({"$defs": {"o": A}}, {"$defs": {"o": A_CLOSED}}),
        ({"anyOf": [A, B]}, {"anyOf": [A_CLOSED, {**B, **CLOSED}]}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [A_CLOSED, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [A_CLOSED]}),
        (
            {"allOf": [A, B]},
            {
                "allOf": [
                    {"properties": BOTH, **CLOSED},
                    {"properties": {"b": {"type": "null"}, "a": True}, **CLOSED},
                ]
            },
        ),
        (
            {**A, "anyOf": [{"required": ["a"]}, {"required": ["c"]}]},
            {
                "properties": {"a": {"type": "null"}, "c": True},
                "anyOf": [{"required": ["a"]}, {"required": ["c"]}],
                **CLOSED,
            },
        ),
        (
            {**A, "dependentRequired": {"a": ["b"]}},
            {"properties": BOTH, "dependentRequired": {"a": ["b"]}, **CLOSED},
        ),
    ],
)  # fmt: skip
def test_objects_that_name_properties_are_closed(schema: Any, closed: Any) -> None:
    assert with_closed_objects(schema) == closed
    assert with_closed_objects(closed) == closed


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"type": "object", "required": ["a"]},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": {}}},
        {"enum": [{"a": None, "b": 1}], "properties": {"a": {}}},
        {"properties": {"a": True}, "const": {"a": 1, "b": 2}},
        {"type": "string"},
    ],
)
def test_what_says_otherwise_stays_open(schema: Any) -> None:
    assert with_closed_objects(schema) == schema


@pytest.mark.parametrize("more", [{"unevaluatedProperties": True}, {"minProperties": 2}])
def test_what_says_otherwise_by_another_keyword_stays_open(more: dict[str, Any]) -> None:
    assert with_closed_objects({**A, **more}) == {**A, **more, "additionalProperties": True}


def test_one_open_part_opens_the_others() -> None:
    opened = {**B, "additionalProperties": True}
    found = with_closed_objects({"allOf": [A, opened]})
    assert found == {"allOf": [{**A, "additionalProperties": True}, opened]}


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "nullable": False}, {"type": "string", "nullable": False}),
        ({"nullable": True}, {"nullable": True}),  # null is allowed anyway
        (
            {"type": "string", "enum": ["a"], "nullable": True},
            {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]},
        ),
        ({"$ref": "#", "nullable": True}, {"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        ({"type": "array", "minItems": 2.0}, {"type": "array", "minItems": 2}),
        ({"type": "array", "minItems": 2.5}, {"type": "array", "minItems": 2.5}),
    ],
)  # fmt: skip
def test_other_dialects(schema: Any, plain: Any) -> None:
    assert in_plain_words({"properties": {"p": schema}}) == {"properties": {"p": plain}}


def test_arguments_as_a_whole_are_not_null() -> None:
    schema = {"type": "object", "nullable": True}
    assert in_plain_words(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {**A, "$defs": {"x": {"$anchor": "x", **B}}, "items": {"$ref": "#x"}},
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}},
        {"allOf": [{"$ref": "#/definitions/a"}, B], "definitions": {"a": A}},
        {"properties": {"self": {"$ref": "#", "required": ["b"]}, "b": {"nullable": True}}},
        {"definitions": 5, "properties": [], "allOf": {}, "$ref": 3, "required": "a"},
    ],
)
def test_the_normal_form_of_a_normal_form_is_itself(schema: Any) -> None:
    once = normal_form(schema)
    twice = normal_form(once)
    assert {**twice, "$defs": None} == {**once, "$defs": None}
    assert normal_form(twice) == twice


def test_a_schema_that_would_grow_too_much_stays_open() -> None:
    wide = [{"properties": {f"p{i}_{j}": {} for j in range(40)}} for i in range(40)]
    assert with_closed_objects({"allOf": wide}) == {"allOf": wide}
