"""Whatever a forced call may be written as is read as that call, or the schema is not enforced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.server.chat.answer import OfferedTool, ToolUse
from paceline.server.chat.answer_formats import TOOL_FORMATS
from paceline.server.chat.answer_requirements import constraint
from tests.server.chat.tool_calls.test_tool_formats import read
from tests.server.chat.tool_calls.tool_samples import SAMPLES
from tests.server.grammars import any_text, close

KEYS = [
    *("first name", "user[id]", "from", "na\u00efve", "it's", 'a"b', "a=b", "x:y", "<tag>"),
    *("a, b", "line\nbreak", " padded ", "a&quot;b", "{", ")", "\\", "1", "x" * 90, "x" * 300),
]
TEXTS = [
    *(
        "a\nb",
        "\n",
        " x ",
        "null",
        "1",
        "\\",
        '"',
        "'''",
        "}",
        "</",
        "</parameter>",
        "</arg_value>",
    ),
    *('<|"|>', "<escape>", "</\uff5cDSML\uff5cparameter>", "<|close|>argument<|sep|>"),
]
FUNCTIONS = ["2fa", "a-b", "a.b", "functions.x", "x", "-", "class", "y" * 64]
QUICK = ("hermes", "qwen3_coder", "deepseek_v32", "kimi_k3", "pythonic", "gemma4")
"""One for each way of writing calls; the others are slow."""
NAMES = [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in SAMPLES]
CLOSED = {"additionalProperties": False}
NESTED = {
    "a b": {"const": 1},
    "l": {"type": "array", "items": {"const": "]"}, "minItems": 1, "maxItems": 1},
    "o": {"type": "object", "properties": {"}": {"const": "{"}}, "required": ["}"], **CLOSED},
}
INSIDE = {"a b": 1, "l": ["]"], "o": {"}": "{"}}


@pytest.fixture(scope="module", autouse=True)
def compiler_ends() -> Iterator[None]:
    yield
    close()


def of(properties: dict[str, Any]) -> dict[str, Any]:
    closed = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**closed, "required": list(properties)}


def written(name: str, schemas: Any, seed: int = 0, most: int | None = 1) -> str:
    tools = [OfferedTool(each, schema) for each, schema in schemas.items()]
    forced = constraint(ToolUse(TOOL_FORMATS[name], tools, True, most), None, None)
    assert forced is not None
    return any_text(forced, seed)


def is_read(name: str, schema: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether the only call that the schema allows is read as it."""
    text = written(name, {"f": schema})
    words, calls = read(name, [text], {"f": schema})
    assert read(name, text, {"f": schema}) == (words, calls)
    return words == "" and [(n, json.loads(a)) for n, a in calls] == [("f", arguments)]


def unenforced(name: str, schema: Any) -> frozenset[str]:
    return TOOL_FORMATS[name].call.forced("f", schema).unenforced


@pytest.mark.parametrize("name", NAMES)
def test_odd_names_of_parameters(name: str) -> None:
    kept = [key for key in KEYS if not unenforced(name, of({key: {"const": "v"}}))]
    assert {"first name", "user[id]", "from", "a=b", "x:y"} <= set(kept)
    assert is_read(name, of({key: {"const": "v"} for key in kept}), dict.fromkeys(kept, "v"))
    lost = of({key: {"const": "v"} for key in KEYS if key not in kept})
    assert unenforced(name, lost) <= {"required"}
    assert is_read(name, lost, {})  # a call all the same, of what can be written


@pytest.mark.parametrize("name", NAMES)
def test_odd_strings(name: str) -> None:
    schemas = {f"p{i}": {"type": "string", "enum": [text]} for i, text in enumerate(TEXTS)}
    kept = {key: each for key, each in schemas.items() if not unenforced(name, of({key: each}))}
    assert len(kept) >= len(TEXTS) - 1  # only what ends a value cannot be written
    assert is_read(name, of(kept), {key: each["enum"][0] for key, each in kept.items()})


@pytest.mark.parametrize("name", NAMES)
def test_objects_in_objects(name: str) -> None:
    assert is_read(name, of({"o": of(NESTED), **NESTED}), {"o": INSIDE, **INSIDE})


@pytest.mark.parametrize("name", NAMES)
def test_odd_names_of_functions(name: str) -> None:
    tools = {each: of({}) for each in FUNCTIONS}
    for function in FUNCTIONS:
        text = written(name, {function: of({})})
        assert read(name, text, tools) == ("", [(function, "{}")])
    form = TOOL_FORMATS[name]
    if not form.before:
        return
    one = written(name, {"2fa": of({})})
    inner = one.removeprefix(form.before).removesuffix(form.after)
    two = form.before + form.separator.join([inner, inner]) + form.after
    assert read(name, two, tools) == ("", [("2fa", "{}")] * 2)
