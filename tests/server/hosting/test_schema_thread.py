"""Schemas are read beside the event loop, one after the other, and within a bound."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from paceline.json_schema.resolver import MOST_STEPS
from paceline.server.chat.answer import AnswerParser, OfferedTool, ToolUse
from paceline.server.chat.answer_formats import TOOL_FORMATS
from paceline.server.chat.answer_parts import CallArguments
from paceline.server.chat.tool_calls.parameters import whole_match
from paceline.server.hosting.serving import SchemaThread
from paceline.server.http.errors import ApiError
from tests.server.asgi import application, client_of
from tests.server.chat.schema_cases import of
from tests.server.chat.test_enforced_schemas import offered

WAIT = 60.0
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SHAPE = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


def test_the_loop_goes_on_while_schemas_are_read_in_turn() -> None:
    told = list[str]()

    async def all_at_once() -> list[str]:
        thread, may_end = SchemaThread(), threading.Event()

        def first() -> str:
            assert may_end.wait(WAIT)
            told.append("first")
            return "first"

        def second() -> str:
            told.append("second")
            return "second"

        found = asyncio.gather(thread.run(first), thread.run(second))
        await asyncio.sleep(0)
        assert not told
        may_end.set()
        return await found

    assert asyncio.run(all_at_once()) == told == ["first", "second"]


@pytest.mark.parametrize(
    "body",
    [
        {"path": "/v1/completions", "prompt": "Once", "response_format": SHAPE},
        {"path": "/v1/completions", "prompt": "Once", "structured_outputs": {"json": SCHEMA}},
    ],
    ids=["response_format", "structured_outputs"],
)
def test_others_are_answered_while_a_schema_is_read(body: dict[str, Any]) -> None:
    path = body.pop("path")

    async def answers() -> list[int]:
        app, may_end = application(), threading.Event()
        schemas = app.state.models.first.schemas
        busy = asyncio.ensure_future(schemas.run(lambda: may_end.wait(WAIT)))
        async with client_of(app) as client:
            shaped = asyncio.ensure_future(client.post(path, json=body))
            plain = await client.post("/v1/completions", json={"prompt": "Once"})
            assert not shaped.done()
            may_end.set()
            assert await busy
            return [plain.status_code, (await shaped).status_code]

    assert asyncio.run(answers()) == [200, 200]


def many(count: int) -> dict[str, Any]:
    """As many properties as each of them may have values."""
    to_values = {f"p{i}": {"$ref": "#/$defs/v"} for i in range(count)}
    return of(**to_values) | {"$defs": {"v": {"enum": [*range(count)]}}}


def test_what_is_gone_through_is_bounded() -> None:
    with pytest.raises(ApiError) as caught:
        offered("qwen3_coder", many(int(MOST_STEPS**0.5) + 10))
    assert str(caught.value) == (
        "parameters cannot be served: written out with its references it has more than 200,000 "
        "schemas, values and properties; refer to large definitions from fewer places, or make "
        "them smaller"
    )


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=p0>\n5\n</parameter>\n</function>"),
        ("pythonic", "[f(p0=5)]"),
    ],
)
def test_calls_by_schemas_that_lead_too_far_are_read(name: str, call: str) -> None:
    names = range(MOST_STEPS // 50)
    schema = {"allOf": [{"properties": dict.fromkeys(map(str, names), True)} for _ in range(60)]}
    use = ToolUse(TOOL_FORMATS[name], [OfferedTool("f", {**schema, "type": "object"})])
    parts = AnswerParser(None, use).push(call, final=True)
    told = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert json.loads(told) == {"p0": 5}


def test_a_class_without_its_end_is_read_once() -> None:
    assert whole_match("[" * 50_000) == f"(?:.|\\n)*(?:{'[' * 50_000})(?:.|\\n)*"
