"""What the text of an answer must match: forced and strict tool calls, response formats.

Owns the structural tag that is composed of them. Compiles nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline import structural_tags
from paceline.server.chat.tool_formats import ToolFormat
from paceline.structured_outputs import StructuredOutputs, ThoughtMarks

Form = dict[str, Any]
"""A format of a structural tag."""

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
    """The tools of one request, and whether the answer must call one of them.

    ``format`` is None where the answer is in Harmony, whose calls are messages.
    """

    format: ToolFormat | None
    tools: Sequence[OfferedTool]
    must_call: bool = False
    max_calls: int | None = None


def constraint(
    tool_use: ToolUse | None, response: StructuredOutputs | None, thoughts: ThoughtMarks | None
) -> StructuredOutputs | None:
    """What holds for an answer behind its thoughts; None where anything may be said.

    An answer that must call a tool does so whatever ``response`` asks for.

    Raises:
        RequestError: what it is composed of is too large.
    """
    form: Form | None = None
    if tool_use is not None and tool_use.must_call:
        form = _calls(tool_use)
    elif response is not None and tool_use is not None:
        form = {"type": "or", "elements": [_calls(tool_use), shape_form(response)]}
    elif tool_use is not None and any(tool.strict for tool in tool_use.tools):
        form = _strict(tool_use)
    if form is not None:
        response = StructuredOutputs(structural_tag={"format": form})
    return response and replace(response, after=thoughts)


def shape_form(response: StructuredOutputs) -> Form:
    """The format of what is asked for."""
    source = response.source
    match response.kind:
        case "json":
            return _json(json.loads(source))
        case "json_object":
            return _json(ANY_OBJECT)
        case "choice":
            texts = [{"type": "const_string", "value": text} for text in json.loads(source)]
            return {"type": "or", "elements": texts}
        case "regex":
            return {"type": "regex", "pattern": source}
        case "grammar":
            return {"type": "grammar", "grammar": source}
    return structural_tags.parsed(source).model_dump()


def _json(schema: Mapping[str, Any] | bool) -> Form:
    return {"type": "json_schema", "json_schema": schema}


def _calls(use: ToolUse) -> Form:
    assert use.format is not None
    return {
        "type": "tags_with_separator",
        "tags": _tags(use),
        "separator": use.format.separator,
        "at_least_one": True,
        "stop_after_first": use.max_calls == 1,
    }


def _tags(use: ToolUse) -> list[Form]:
    """A tag for the calls of each tool."""
    form = use.format
    assert form is not None
    return [
        {
            "begin": f'{form.before}{{"name": {json.dumps(tool.name)}, "{form.key}": ',
            "content": _json(tool.schema if use.must_call or tool.strict else ANY_OBJECT),
            "end": "}" + form.after,
        }
        for tool in use.tools
    ]


def _strict(use: ToolUse) -> Form:
    """Words and calls as the model likes; but a call that begins is well formed."""
    assert use.format is not None
    if use.format.bare:
        words = {"type": "regex", "pattern": r"[^{\s](.|\n)*"}
        return {"type": "or", "elements": [_calls(use), {"type": "optional", "content": words}]}
    return {"type": "triggered_tags", "triggers": [*use.format.opening], "tags": _tags(use)}
