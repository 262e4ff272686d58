"""Where references of JSON schemas lead, and which schemas exclude each other."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from paceline.core.errors import RequestError
from paceline.json_schema.enforceable import are_disjoint
from paceline.json_schema.references import (
    References,
    endless_reference,
    with_plain_references,
)
from paceline.request.structured_outputs import StructuredOutputs

NEXT = {"properties": {"next": {"$ref": "#"}}}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        ({"$ref": "#"}, "#"),
        ({"allOf": [{"type": "object"}, {"$ref": "#"}]}, "#"),
        ({"anyOf": [{"$ref": "#"}]}, "#"),
        ({**NEXT, "required": ["next"]}, "#"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
         "#/$defs/a"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/a~1b"}]}}},
         "#/$defs/a~1b"),
        ({"$ref": "#/$defs/a/allOf/0", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
         "#/$defs/a"),
        (NEXT, None),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, None),
        ({"properties": {"all": {"items": {"$ref": "#"}}}, "required": ["all"]}, None),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}, None),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {}}}, None),
        ({"$ref": "https://example.com/schema"}, None),
        ({"$ref": "#anchor"}, None),
        ({"$ref": 5, "allOf": 3, "anyOf": [4], "required": "a", "properties": []}, None),
        (True, None),
    ],
)  # fmt: skip
def test_references_that_lead_back_to_themselves(schema: Any, reference: str | None) -> None:
    assert endless_reference(schema) == reference
    if isinstance(schema, dict) and reference is not None:
        with pytest.raises(RequestError, match=r"leads back to itself with no way out"):
            StructuredOutputs(json=schema)


def test_a_long_way_without_a_loop_is_gone() -> None:
    names = [f"n{i}" for i in range(2000)]
    pairs = itertools.pairwise(names)
    links = {one: {"$ref": f"#/$defs/{other}"} for one, other in pairs}
    schema = {"$ref": "#/$defs/n0", "$defs": {**links, names[-1]: {}}}
    assert endless_reference(schema) is None
    assert endless_reference({**schema, "$defs": {**links, names[-1]: {"$ref": "#"}}}) == "#"


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("#", "root"),
        ("#/$defs/a", "a"),
        ("#/anyOf/0", "first"),
        ("#/%24defs/a", "a"),
        ("#/$defs/b c", "spaced"),
        ("#/$defs/b%20c", "spaced"),
        ("#/$defs/ä[ß]", "letters"),
        ("#/$defs/%C3%A4%5B%C3%9F%5D", "letters"),
        ("#/$defs/d~1e~0f", "escaped"),
        ("#/$defs/50%", "percent"),
        ("#/$defs/50%25", "percent"),
        ("#/$defs/%31", "written with a percent sign"),
        ("#/components/schemas/g", "elsewhere"),
        ("#here", "anchor"),
        ("#old", "old anchor"),
        ("http://example.com/root#/$defs/a", "a"),
        ("other", "other"),
        ("http://example.com/other#/$defs/inner", "inner"),
        ("urn:example:x", "urn"),
        ("#/anyOf/9", None),
        ("#/nowhere/at/all", None),
        ("#/$defs/a/type/x", None),
        ("#nowhere", None),
        ("other.json#/a", None),
        ("http://[", None),
        (5, None),
    ],
)  # fmt: skip
def test_where_a_reference_leads(reference: Any, name: str | None) -> None:
    root = {
        "$id": "http://example.com/root",
        "title": "root",
        "$defs": {
            "a": {"title": "a", "type": "null"},
            "b c": {"title": "spaced"},
            "ä[ß]": {"title": "letters"},
            "d/e~f": {"title": "escaped"},
            "50%": {"title": "percent"},
            "%31": {"title": "written with a percent sign"},
            "h": {"title": "anchor", "$anchor": "here"},
            "i": {"title": "old anchor", "$id": "#old"},
            "j": {"title": "other", "$id": "other", "$defs": {"inner": {"title": "inner"}}},
            "k": {"title": "urn", "$id": "urn:example:x"},
        },
        "components": {"schemas": {"g": {"title": "elsewhere"}}},
        "anyOf": [{"title": "first"}],
        "properties": {"p": {"$ref": reference}},
    }
    found = References(root).target(root["properties"]["p"])
    assert (found and found["title"]) == name
    plain = with_plain_references(root)
    to = plain["properties"]["p"]["$ref"]
    if name is None:
        assert to == reference
    else:
        assert re.fullmatch(r"#/\$defs/[\w.-]+", to, re.ASCII)
        assert plain["$defs"][to.rpartition("/")[2]]["title"] == name
    assert with_plain_references(plain) == plain
    assert not {"$id", "$anchor"} & plain.keys()


@pytest.mark.parametrize(
    ("schemas", "disjoint"),
    [
        ([{"type": "string"}, {"type": "integer"}, {"type": ["null", "array"]}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": 1}, {"enum": [2, 3]}], True),
        ([{"const": 1}, {"enum": [1, 3]}], False),
        ([CAT, DOG], True),
        ([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], True),
        ([CAT, {**DOG, "required": []}], False),
        ([CAT, {**DOG, "type": ["object", "string"]}], True),
        ([{k: v for k, v in CAT.items() if k != "type"}, {"required": ["kind"]}], False),
        ([CAT, CAT], False),
        ([{}, {"type": "string"}], False),
        ([{"$ref": "#/$defs/loop"}, CAT], False),
        ([True, {"type": "string"}], False),
        ([{"const": i} for i in range(65)], False),
    ],
)
def test_schemas_that_exclude_each_other(schemas: list[Any], disjoint: bool) -> None:
    root = {"$defs": {"cat": CAT, "dog": DOG, "loop": {"$ref": "#/$defs/loop"}}}
    assert are_disjoint(schemas, References(root)) is disjoint
