"""Schemas that are long or oddly written, through a server with the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.chat.schema_cases import CASES, LEFT, LEFT_BARE, LEFT_COUNTS, TEXT, of
from tests.server.chat.test_enforceable import HEADER
from tests.server.chats import CHATML
from tests.server.served import KEY, chat_model, served

pytestmark = pytest.mark.slow
BRIEF = "{%- for message" + CHATML.partition("{%- for message")[2]  # tools are not in the prompt
ODD = {
    "1,500 values": of(a={**TEXT, "enum": [f"value {i}" for i in range(1500)]}),
    "1,500 numbers": of(a={"enum": list(range(1500))}),
    "nullable": of(a={**TEXT, "maxLength": 3, "nullable": True}),
    "nullable values": of(a={"enum": ["x", "y"], "nullable": True}),
}
MEANT = {
    "nullable": of(a={"type": ["string", "null"], "maxLength": 3}),
    "nullable values": of(a={"enum": ["x", "y", None]}),
}
"""What the schemas of OpenAPI say, in JSON Schema's words."""
CHOSEN = {name: each for name, each in CASES.items() if name.startswith(("$ref", "object"))} | ODD


@pytest.fixture(scope="module", params=["qwen3_coder", "gemma4", "hermes"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = chat_model(tmp_path_factory.mktemp("served"))
    (folder / "chat_template.jinja").write_text(BRIEF)
    with served(Path(folder), "--tool-call-parser", request.param) as address:
        yield address


def asked(url: str, schema: Any, **more: Any) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "Go."}],
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 7,
        **more,
    }
    function = {"name": "f", "parameters": schema}
    if "response_format" not in more:
        body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120)


def test_calls_match_or_the_header_says_so(url: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for name, schema in CHOSEN.items():
        response = asked(url, schema)
        assert response.status_code == 200, (name, response.text)
        (choice,) = response.json()["choices"]
        if HEADER in response.headers:
            named = {*LEFT.get(name, ()), *LEFT_BARE.get(name, ()), *LEFT_COUNTS.get(name, ())}
            assert named, name
            assert set(response.headers[HEADER].split(", ")) <= named, name
        elif choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            validator = jsonschema.Draft202012Validator(MEANT.get(name, schema))
            assert validator.is_valid(arguments), (name, arguments)


def test_response_formats_match(url: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    wish = {"type": "json_schema", "json_schema": {"name": "a", "schema": ODD["1,500 values"]}}
    response = asked(url, None, response_format=wish)
    assert response.status_code == 200, response.text
    value = json.loads(response.json()["choices"][0]["message"]["content"])
    assert jsonschema.Draft202012Validator(ODD["1,500 values"]).is_valid(value)


def test_what_is_refused_shows_no_inner_names(url: str) -> None:
    too_long = of(
        **{f"p{i}": {**TEXT, "enum": [f"{i} {j}" for j in range(200)]} for i in range(40)}
    )
    wrong = [too_long, of(a={**TEXT, "pattern": "("}), of(a={"$ref": "#/properties/a"})]
    for schema in wrong:
        response = asked(url, schema)
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert "structural_tag" not in message
        assert "format." not in message
        assert "elements" not in message
