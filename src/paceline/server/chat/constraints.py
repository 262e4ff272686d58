"""What the text of an answer must match: forced and strict tool calls, response formats.

Owns the structural tag that is composed of them. Compiles nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from paceline.request import structural_tags
from paceline.request.structured_outputs import StructuredOutputs, ThoughtMarks
from paceline.server.chat.calls.forms import (
    Form,
    const,
    json_of,
    one_of,
    optional,
    regex,
    separated,
    tag,
)
from paceline.server.chat.tool_calls import ToolUse

ANY_OBJECT: dict[str, Any] = {"type": "object"}


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
        form = one_of([_calls(tool_use), shape_form(response)])
    elif tool_use is not None and any(tool.strict for tool in tool_use.tools):
        form = _strict(tool_use)
    if form is not None:
        response = StructuredOutputs(structural_tag={"format": form}, composed=True)
    if response is None and thoughts is not None and thoughts.budget is not None:
        return StructuredOutputs(free=True, after=thoughts)
    return response and replace(response, after=thoughts)


def shape_form(response: StructuredOutputs) -> Form:
    """The format of what is asked for."""
    source = response.source
    match response.kind:
        case "json":
            return json_of(json.loads(source))
        case "json_object":
            return json_of(ANY_OBJECT)
        case "choice":
            return one_of(map(const, json.loads(source)))
        case "regex":
            return regex(source)
        case "grammar":
            return {"type": "grammar", "grammar": source}
    return structural_tags.parsed(source).model_dump()


def _calls(use: ToolUse) -> Form:
    """Calls and nothing else, between the marks of the format if it has such."""
    form = use.format
    assert form is not None
    calls = separated(_tags(use), form.separator, at_least_one=True, only_one=use.max_calls == 1)
    return tag(form.before, calls, form.after) if form.before else calls


def _tags(use: ToolUse) -> list[Form]:
    """A tag for the calls of each tool."""
    form, forced = use.format, use.must_call
    assert form is not None
    return [
        form.call.tag(tool.name, tool.schema if forced or tool.strict else ANY_OBJECT)
        for tool in use.tools
    ]


def _strict(use: ToolUse) -> Form:
    """Words and calls as the model likes; but a call that begins is well formed."""
    form = use.format
    assert form is not None
    if form.start:
        words = regex(rf"[^{re.escape(form.start)}\s](.|\n)*")
        return one_of([_calls(use), optional(words)])
    tags = [_calls(use)] if form.before else _tags(use)
    triggers = [each for each in form.opening if any(t["begin"].startswith(each) for t in tags)]
    marks = *form.opening, *form.inner
    others = [each for each in marks if not any(each in trigger for trigger in triggers)]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, "excludes": others}
