"""What the text of an answer must match: forced and strict tool calls, response formats.

Owns the grammar (Lark, as llguidance reads it) that is composed of them. Compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import RequestError
from paceline.server.chat.tool_formats import ToolFormat
from paceline.structured_outputs import JSON_STYLE, StructuredOutputs, ThoughtMarks

ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that the model may call; ``strict`` calls match the schema of the arguments.

    ``unenforced`` are the keywords that were left out of the schema.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool = False
    unenforced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and whether the answer must call one of them."""

    format: ToolFormat
    tools: Sequence[OfferedTool]
    must_call: bool = False
    max_calls: int | None = None


def constraint(
    tool_use: ToolUse | None, response: StructuredOutputs | None, thoughts: ThoughtMarks | None
) -> StructuredOutputs | None:
    """What holds for an answer behind its thoughts; None where anything may be said.

    An answer that must call a tool does so whatever ``response`` asks for.

    Raises:
        RequestError: a grammar was asked for beside tools.
    """
    rules: list[str] = []
    if tool_use is not None and tool_use.must_call:
        rules = ["start: calls", *_call_rules(tool_use)]
    elif response is not None and tool_use is not None:
        rules = ["start: calls | shape", f"shape: {_shape(response)}", *_call_rules(tool_use)]
    elif tool_use is not None and any(tool.strict for tool in tool_use.tools):
        rules = _strict_rules(tool_use)
    if rules:
        response = StructuredOutputs(grammar="\n".join(["%llguidance {}", *rules]) + "\n")
    return response and replace(response, after=thoughts)


def _shape(response: StructuredOutputs) -> str:
    """The right-hand side of a rule for what is asked for."""
    source = response.source
    match response.kind:
        case "json":
            return _json_rule(json.loads(source))
        case "json_object":
            return _json_rule(ANY_OBJECT)
        case "choice":
            return " | ".join(_json(text) for text in json.loads(source))
        case "regex":
            return f"/(?:{_with_slashes_escaped(source)})/"
    raise RequestError(
        "structured_outputs.grammar holds for a whole answer, and this one may call tools; send "
        'tool_choice "none"'
    )


def _json_rule(schema: Mapping[str, Any] | bool) -> str:
    """What matches JSON of a schema; its own wishes as to white space come first."""
    if isinstance(schema, bool):
        return f"%json {_json(schema)}"
    own = schema.get("x-guidance")
    style = {**JSON_STYLE, **(own if isinstance(own, Mapping) else {})}
    return f"%json {_json({**schema, 'x-guidance': style})}"


def _with_slashes_escaped(pattern: str) -> str:
    """A regular expression as Lark writes it, between slashes."""
    escaped, is_escaped = [], False
    for character in pattern:
        if character == "/" and not is_escaped:
            escaped.append("\\")
        escaped.append(character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(escaped).replace("\n", "\\n")


def _call_rules(use: ToolUse, before: str | None = None) -> list[str]:
    """Rules ``calls`` and ``call``; ``before`` replaces what the format begins a call with."""
    form = use.format
    more = "" if use.max_calls == 1 else f" ({_json(form.separator)} call)*"
    begin = form.before if before is None else before
    rules = [f"calls: call{more}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(use.tools))))
    for i, tool in enumerate(use.tools):
        head = begin + f'{{"name": {_json(tool.name)}, "{form.key}": '
        schema = tool.schema if use.must_call or tool.strict else ANY_OBJECT
        before_schema, after_schema = _literal(head, form), _literal("}" + form.after, form)
        rules.append(f"call_{i}: {before_schema} {_json_rule(schema)} {after_schema}")
    return rules


def _strict_rules(use: ToolUse) -> list[str]:
    """Words and calls as the model likes; but a call that begins is well formed."""
    if use.format.bare:
        words = r"WORDS: /[^{\s](.|\n)*/"
        return ["start: calls | WORDS?", words, *_call_rules(use)]
    tag = use.format.opening[0]
    rest = use.format.before.removeprefix(tag)
    rules = _call_rules(use, rest)[1:]
    return [
        "start: (begin call)* WORDS",
        f"begin: WORDS {tag}" if tag in use.format.token_tags else rf"begin[lazy]: /(.|\n)*{tag}/",
        r"WORDS: /(.|\n)*/",
        *rules,
    ]


def _literal(text: str, form: ToolFormat) -> str:
    """A fixed text; tags that are single tokens are written as these."""
    if not form.token_tags:
        return _json(text)
    parts = re.split("(" + "|".join(map(re.escape, form.token_tags)) + ")", text)
    return " ".join(part if part in form.token_tags else _json(part) for part in parts if part)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
