"""Pieces of grammars in Lark, as llguidance reads them: texts, expressions, JSON of a schema.

Knows no request and compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.json_schema.normal_form import normal_form
from paceline.request.structured_outputs import JSON_STYLE
from paceline.structured.gbnf import from_gbnf
from paceline.text.token_pieces import TokenNames

_GBNF = re.compile(r"(?:^|[\r\n])[ \t]*[\w-]+[ \t]*::=")
"""A rule of GBNF or EBNF; Lark writes a colon alone. Within its line, since what could run on over
empty lines would take the square of their number."""


def source_of(grammar: str, tokens: TokenNames, *, is_whole: bool = True) -> dict[str, str]:
    """A grammar in Lark or GBNF, in Lark.

    Args:
        is_whole: nothing is behind what the grammar matches.

    Raises:
        RequestError: it is in GBNF and cannot be used.
    """
    if _GBNF.search(grammar):
        grammar = from_gbnf(grammar, tokens, is_whole=is_whole)
    return {"lark_grammar": grammar}


def json_of(schema: Mapping[str, Any] | bool) -> str:
    """What matches JSON of a schema; its own wishes as to white space come first."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    schema = dict(normal_form(schema))
    own = schema.get("x-guidance")
    style = {**JSON_STYLE, **(own if isinstance(own, Mapping) else {})}
    return f"%json {quoted({**schema, 'x-guidance': style})}"


def expression(pattern: str) -> str:
    """A regular expression as Lark writes it, between slashes."""
    escaped, is_escaped = [], False
    for character in pattern:
        if character == "/" and not is_escaped:
            escaped.append("\\")
        escaped.append(character)
        is_escaped = character == "\\" and not is_escaped
    return f"/(?:{''.join(escaped)})/".replace("\n", "\\n")


def escaped(text: str) -> str:
    """A fixed text inside of a regular expression."""
    return re.sub(r"[][\\^$.|?*+(){}\-&~#]", r"\\\g<0>", text)


def quoted(value: Any) -> str:
    """A fixed text, or a schema, as JSON writes it and Lark reads it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
