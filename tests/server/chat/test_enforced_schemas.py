"""Forced calls match the schema of their tool, or what is not held is named and refused if strict.

Held against jsonschema, the reference of Draft 2020-12 in Python.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from paceline.server.chat.answer import OfferedTool, ToolUse
from paceline.server.chat.answer_formats import TOOL_FORMATS
from paceline.server.chat.answer_requirements import constraint
from paceline.server.chat.response_formats import Enforced, enforced
from paceline.server.http.errors import ApiError
from tests.server.chat.byte_texts import byte_matcher, drawn
from tests.server.chat.schema_cases import CASES, LEFT, LEFT_BARE, LEFT_COUNTS, of
from tests.server.chat.tool_calls.test_tool_formats import read

ONE_BY_ONE = {
    "qwen3_coder": "\n</parameter>\n",
    "glm47": "</arg_value>",
    "deepseek_v32": "</\uff5cDSML\uff5cparameter>\n",
    "gemma4": '<|"|>',
    "pythonic": ")",
    "seed_oss": "\n</parameter>\n",
    "glm45": "</arg_value>\n",
    "minimax_m2": "</parameter>\n",
    "minicpm5": "</param>",
    "deepseek_v4": "</\uff5cDSML\uff5cparameter>\n",
    "olmo3": ")",
    "lfm2": ")",
    "functiongemma": "<escape>",
    "kimi_k3": "<|close|>argument<|sep|>",
    "hy_v3": "</arg_value:opensource>\n",
}
"""Formats that write parameters one by one, each with what ends a string."""
BARE = {"qwen3_coder", "seed_oss", "glm45", "glm47", "minimax_m2", "minicpm5", "hy_v3"}
"""Those of them that write a string as they write any other value."""
MARKED = {"gemma4", "functiongemma"}
"""Those that have marks of their own around strings."""
QUICK = list(zip(itertools.cycle(("qwen3_coder", "gemma4", "deepseek_v32")), CASES, strict=False))
"""One format for each case, in turn; the others are slow."""


def offered(name: str, schema: Any, strict: bool = False) -> Enforced:
    return enforced(schema, strict, "parameters", partial(TOOL_FORMATS[name].call.forced, "f"))


def calls(name: str, schema: Any, draws: int) -> Iterator[dict[str, Any]]:
    """Arguments of forced calls, drawn in the same way each time."""
    tool = OfferedTool("f", schema)
    forced = constraint(ToolUse(TOOL_FORMATS[name], [tool], True, 1), None, None)
    assert forced is not None
    matcher = byte_matcher(forced)
    draw = random.Random(zlib.crc32(name.encode()))
    for _ in range(draws):
        text = drawn(matcher, draw, [ONE_BY_ONE[name].encode(), b"</function>"])
        if text is not None:
            words, found = read(name, [text], {"f": schema})
            assert (words, len(found)) == ("", 1), text
            yield json.loads(found[0][1])


def left(name: str, case: str) -> list[str]:
    """The keywords that a format does not hold."""
    found = LEFT.get(case, [])
    found = found or (LEFT_BARE.get(case, []) if name in BARE else [])
    return found or (LEFT_COUNTS.get(case, []) if name in MARKED else [])


def hold(name: str, case: str, draws: int) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema, named = CASES[case], left(name, case)
    found = offered(name, schema)
    assert list(found.unenforced) == named
    arguments = list(calls(name, found.schema, draws))
    assert arguments, "no draw came to an end"
    if not named:
        validator = jsonschema.Draft202012Validator(schema)
        assert [each for each in arguments if not validator.is_valid(each)] == []
        return
    with pytest.raises(ApiError, match=re.escape(", ".join(named))) as caught:
        offered(name, schema, strict=True)
    assert caught.value.status == 400


@pytest.mark.parametrize(("name", "case"), QUICK)
def test_arguments_match_or_it_is_said(name: str, case: str) -> None:
    hold(name, case, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("case", CASES)
def test_arguments_of_every_format_match_or_it_is_said(name: str, case: str) -> None:
    hold(name, case, 10)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
def test_only_what_the_schema_says_itself_is_named(name: str, is_closed: bool) -> None:
    """A loop loses the closing of its objects, which may have been added to them."""
    more = {"additionalProperties": False} if is_closed else {}
    node = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}},
        "anyOf": [{"$ref": "#/$defs/n"}, {"required": ["v"]}],
        **more,
    }
    found = offered(name, of(a={"$ref": "#/$defs/n"}) | {"$defs": {"n": node}})
    assert "properties" in found.unenforced
    assert ("additionalProperties" in found.unenforced) is is_closed
