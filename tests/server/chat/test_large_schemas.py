"""Large schemas, made to be slow or deep, are served, or it is said what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.errors import RequestError, ShapeError
from paceline.json_schema.normal_form import normal_form
from paceline.json_schema.resolver import MOST_JOINED
from paceline.request.structured_outputs import MAX_SOURCE_BYTES
from paceline.server.chat.answer import OfferedTool, ToolUse
from paceline.server.chat.answer_formats import TOOL_FORMATS
from paceline.server.chat.answer_requirements import constraint
from paceline.server.chat.response_formats import blamed
from tests.server.chat.byte_texts import byte_matcher
from tests.server.chat.schema_cases import INT, NULL, TEXT, of
from tests.server.chat.test_enforced_schemas import offered

MANY = 900


def to(name: object) -> dict[str, Any]:
    return {"$ref": f"#/$defs/d{name}"}


def chain(step: Any, last: Any, count: int = MANY) -> dict[str, Any]:
    return {**to(0), "$defs": {f"d{i}": step(i) for i in range(count)} | {f"d{count}": last}}


OBJECT = {"type": "object", "properties": {"a": to(0)}}
SLOW = {
    "references": chain(lambda i: to(i + 1), {"type": "object"}),
    "properties": chain(lambda i: {"properties": {"n": to(i + 1)}}, {**to(0), "type": "object"}),
    "allOf": chain(lambda i: {"allOf": [to(i + 1), {}]}, OBJECT),
    "anyOf": chain(lambda i: {"anyOf": [to(i + 1), NULL]}, OBJECT),
    "written out": chain(
        lambda i: {"properties": {"x": {"allOf": [to(i + 1), {"properties": {f"b{i}": {}}}]}}},
        OBJECT,
        count=500,
    ),
    "all with all": {
        **OBJECT,
        "$defs": {f"d{i}": {"anyOf": [to(j) for j in range(30)]} for i in range(30)},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4", "pythonic"])
@pytest.mark.parametrize("case", SLOW)
def test_schemas_that_lead_far_are_served(name: str, case: str) -> None:
    found = offered(name, SLOW[case])
    assert constraint(
        ToolUse(TOOL_FORMATS[name], [OfferedTool("f", found.schema)], True, 1), None, None
    )


def test_a_way_that_is_too_long_is_named() -> None:
    near = chain(lambda i: to(i + 1), {"type": "object"}, count=MOST_JOINED - 2)
    assert offered("qwen3_coder", near).unenforced == ()
    far = chain(lambda i: to(i + 1), {"type": "object"}, count=MOST_JOINED + 2)
    assert offered("qwen3_coder", far).unenforced == ("$ref",)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_coder",
        pytest.param("gemma4", marks=pytest.mark.slow),
        pytest.param("hermes", marks=pytest.mark.slow),
    ],
)
def test_many_values_and_parameters(name: str) -> None:
    schema = of(a={**TEXT, "enum": [f"value {i}" for i in range(1500)]})
    schema["properties"] |= {f"p{i}": INT for i in range(1100)}
    found = offered(name, schema)
    assert found.unenforced == ()
    tools = [OfferedTool("f", found.schema)]
    forced = constraint(ToolUse(TOOL_FORMATS[name], tools, True, 1), None, None)
    assert forced is not None
    assert not byte_matcher(forced).is_error()


def test_what_closing_adds_does_not_count() -> None:
    objects = {f"p{i}": {"properties": {"q": True}} for i in range(1500)}
    schema = {"type": "object", "properties": objects}
    written = json.dumps(normal_form(schema), separators=(",", ":"))
    assert len(json.dumps(schema, separators=(",", ":"))) < MAX_SOURCE_BYTES < len(written)
    tools = [OfferedTool("f", offered("hermes", schema).schema)]
    assert constraint(ToolUse(TOOL_FORMATS["hermes"], tools, True, 1), None, None)


def test_errors_do_not_show_what_was_composed() -> None:
    schema = {"properties": {"a": {**INT, "allOf": [to(0)]}}, "$defs": {"d0": to(0)}}
    tools = [OfferedTool("f", offered("qwen3_coder", schema).schema)]
    with pytest.raises(RequestError) as caught:
        constraint(ToolUse(TOOL_FORMATS["qwen3_coder"], tools, True, 1), None, None)
    assert str(blamed(caught.value, "tools")) == (
        "tools cannot be served: its $ref '#/$defs/d0' leads back to itself with no way out"
    )
    large = ShapeError("structural_tag", "has 9 bytes; at most 8 are allowed")
    assert str(blamed(large, "tools")) == (
        "tools cannot be served: its grammar has 9 bytes; at most 8 are allowed"
    )
