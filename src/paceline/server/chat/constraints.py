"""What the text of an answer must match: forced and strict tool calls, response formats, thoughts.

Owns the grammar (Lark, as llguidance reads it) that is composed of them. Compiles nothing.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import RequestError
from paceline.server.chat.tool_formats import ToolFormat
from paceline.structured_outputs import JSON_STYLE, StructuredOutputs

ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Thoughts(enum.Enum):
    """Whether an answer begins with thoughts."""

    NONE = "none"
    POSSIBLE = "possible"
    OPENED = "opened"  # the prompt ends inside of them


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
    tool_use: ToolUse | None, response: StructuredOutputs | None, thoughts: Thoughts
) -> StructuredOutputs | None:
    """The grammar of a whole answer; None where anything may be said.

    Thoughts are free; what ``response`` asks for holds for what follows them. An answer that must
    call a tool does so whatever ``response`` asks for.

    Raises:
        RequestError: a Lark grammar was asked for after thoughts.
    """
    rules: list[str] = []
    if tool_use is not None and tool_use.must_call:
        rules = ["answer: calls", *_call_rules(tool_use)]
    elif response is not None:
        if tool_use is None and thoughts is Thoughts.NONE:
            return response
        rules = [f"shape: {_shape(response)}"]
        if tool_use is None:
            rules.append("answer: shape")
        else:
            rules += ["answer: calls | shape", *_call_rules(tool_use)]
    elif tool_use is not None and any(tool.strict for tool in tool_use.tools):
        rules = _strict_rules(tool_use)
    if not rules:
        return None
    lines = ["%llguidance {}", *_start_rules(thoughts), *rules]
    return StructuredOutputs(grammar="\n".join(lines) + "\n")


def _start_rules(thoughts: Thoughts) -> list[str]:
    if thoughts is Thoughts.NONE:
        return ["start: answer"]
    begin = "close GAP" if thoughts is Thoughts.OPENED else '("<think>" close GAP)?'
    return [f"start: {begin} answer", r"close[lazy]: /(.|\n)*<\/think>/", r"GAP: /\s{0,4}/"]


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
        "structured_outputs.grammar holds for a whole answer, and this one may begin with thoughts "
        'or call tools; send tool_choice "none" and switch thinking off in chat_template_kwargs'
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
        rules.append(f"call_{i}: {_json(head)} {_json_rule(schema)} {_json('}' + form.after)}")
    return rules


def _strict_rules(use: ToolUse) -> list[str]:
    """Words and calls as the model likes; but a call that begins is well formed."""
    if use.format.bare:
        words = r"WORDS: /[^{\s](.|\n)*/"
        return ["answer: calls | WORDS?", words, *_call_rules(use)]
    tag = use.format.opening[0]
    rest = use.format.before.removeprefix(tag)
    rules = _call_rules(use, rest)[1:]
    return [
        "answer: (begin call)* WORDS",
        rf"begin[lazy]: /(.|\n)*{tag}/",
        r"WORDS: /(.|\n)*/",
        *rules,
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
