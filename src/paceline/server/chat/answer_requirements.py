"""What a chat request demands of its answer: tools that may or must be called, and its shape.

Owns the way from the fields of the request to a structural tag, in the model's own format of calls
or in Harmony, and which field an error is laid to. Compiles nothing.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import RequestError
from paceline.json_schema.normal_form import normal_form
from paceline.request import structural_tags
from paceline.request.structured_outputs import StructuredOutputs, ThoughtMarks
from paceline.server.chat.answer import AnswerParser, OfferedTool, ToolUse, Wrapping
from paceline.server.chat.harmony import (
    ASSISTANT,
    CHANNEL,
    END,
    FUNCTIONS,
    MESSAGE,
    Harmony,
    HarmonyParser,
    HarmonyPlace,
)
from paceline.server.chat.response_formats import blamed, enforced, response_shape, shape_param
from paceline.server.chat.tool_calls.format import ToolFormat
from paceline.server.chat.tool_calls.tag_forms import (
    ANY_TEXT,
    Form,
    const,
    json_of,
    one_of,
    optional,
    regex,
    separated,
    sequence,
    star,
    tag,
)
from paceline.server.http.errors import ApiError
from paceline.server.protocol.chat import ChatCompletionRequest, FunctionDefinition, NamedTool

_NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_COMBINERS = ("$ref", "anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class AnswerRequirements:
    """What holds for every sample of one answer.

    Attributes:
        thoughts: marks of those that it may begin with, or the format in which all of it is.
        wrapping: marks around what follows the thoughts.
        grammar: what follows the thoughts must match it; None where anything may be said.
        shows_thoughts: thoughts and their marks are words of the answer.
        param: the field of the request that an error in the grammar is laid to.
        unenforced: keywords of the schema that holds which could not be enforced.
    """

    thoughts: ThoughtMarks | Harmony | None
    wrapping: Wrapping | None
    tool_use: ToolUse | None
    grammar: StructuredOutputs | None
    param: str | None
    unenforced: tuple[str, ...] = ()
    shows_thoughts: bool = False

    @classmethod
    def of(
        cls,
        body: ChatCompletionRequest,
        form: ToolFormat | None,
        thoughts: ThoughtMarks | Harmony | None,
        wrapping: Wrapping | None = None,
    ) -> AnswerRequirements:
        """
        Args:
            form: how the model writes calls; None where that is not known.

        Raises:
            ApiError: tools or a response format cannot be served, or cannot be used together.
        """
        if isinstance(thoughts, ThoughtMarks):
            thoughts = replace(thoughts, budget=body.thinking_budget)
        use = _tool_use(body, form, in_harmony=isinstance(thoughts, Harmony))
        must_call = use is not None and use.must_call
        param = "tools" if must_call else shape_param(body) or "tools"
        if param == "tools" and body.structured_outputs is not None:
            raise ApiError(
                400,
                f"{body.called('structured_outputs')} is given beside a tool_choice that forces a "
                "call; use one of them",
                param=body.called("structured_outputs"),
            )
        shape, unenforced = response_shape(body)
        try:
            if isinstance(thoughts, Harmony):
                grammar = harmony_constraint(thoughts, use, shape)
            else:
                grammar = constraint(use, shape, thoughts)
        except RequestError as error:
            raise blamed(error, param) from error
        if use is not None and use.must_call:
            unenforced = tuple(sorted({key for tool in use.tools for key in tool.unenforced}))
        blamed_on = param if grammar is not None else None
        shows = body.reasoning_format == "none"
        return cls(thoughts, wrapping, use, grammar, blamed_on, unenforced, shows)

    def parser(self) -> AnswerParser | HarmonyParser:
        """A parser for one sample."""
        if isinstance(self.thoughts, Harmony):
            use = self.tool_use
            names = [tool.name for tool in use.tools] if use else []
            return HarmonyParser(self.thoughts, names, use.max_calls if use else None)
        if self.shows_thoughts:
            return AnswerParser(self.thoughts, self.tool_use, shows_thoughts=True)
        return AnswerParser(self.thoughts, self.tool_use, self.wrapping)


def _tool_use(
    body: ChatCompletionRequest, form: ToolFormat | None, in_harmony: bool
) -> ToolUse | None:
    if not body.tools or body.tool_choice == "none":
        return None
    if form is None and not in_harmony:
        raise ApiError(
            400,
            "tools cannot be served: the model's chat template shows no format of tool calls that "
            "is known here; if the model writes one, start the server with its --tool-call-parser",
            param="tools",
        )
    choice, parameters = body.tool_choice, body.called("function.parameters")
    functions = {f"tools.{i}.{parameters}": tool.function for i, tool in enumerate(body.tools)}
    if isinstance(choice, NamedTool):
        name = choice.function.name
        chosen = [_offered(f, at, form, True) for at, f in functions.items() if f.name == name]
        return ToolUse(form, chosen, must_call=True, max_calls=1)
    must_call = choice == "required"
    offered = [_offered(function, at, form, must_call) for at, function in functions.items()]
    max_calls = 1 if body.parallel_tool_calls is False else None
    return ToolUse(form, offered, must_call, max_calls)


def _offered(
    function: FunctionDefinition, param: str, form: ToolFormat | None, must_call: bool
) -> OfferedTool:
    """``ApiError`` where its parameters are no object, or must hold and cannot be enforced."""
    schema = _NO_PARAMETERS if function.parameters is None else function.parameters
    kind = schema.get("type")
    if kind is None and not any(key in schema for key in _COMBINERS):
        schema = {**ANY_OBJECT, **schema}
    elif kind not in (None, "object"):
        raise ApiError(
            400,
            f"parameters of {function.name} are of type {str(kind)[:40]!r}; arguments are always "
            "an object",
            param=param,
        )
    strict = bool(function.strict)
    if not must_call and not strict:
        return OfferedTool(function.name, normal_form(schema))
    forced = None if form is None else functools.partial(form.call.forced, function.name)
    held = enforced(schema, strict, param, forced)
    return OfferedTool(function.name, held.schema, strict, held.unenforced, held.tag)


ANY_OBJECT: dict[str, Any] = {"type": "object"}


def constraint(
    tool_use: ToolUse | None, response: StructuredOutputs | None, thoughts: ThoughtMarks | None
) -> StructuredOutputs | None:
    """What holds for an answer behind its thoughts; None where anything may be said.

    An answer that must call a tool does so whatever ``response`` asks for. ``RequestError`` where
    what it is composed of is too large.
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
    return response and response.behind(thoughts)


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
    form = use.format
    assert form is not None
    calls = separated(_tags(use), form.separator, at_least_one=True, only_one=use.max_calls == 1)
    return tag(form.before, calls, form.after) if form.before else calls


def _tags(use: ToolUse) -> list[Form]:
    form, forced = use.format, use.must_call
    assert form is not None
    return [
        tool.tag
        or form.call.forced(tool.name, tool.schema if forced or tool.strict else ANY_OBJECT).tag
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


def harmony_constraint(
    harmony: Harmony, use: ToolUse | None, response: StructuredOutputs | None
) -> StructuredOutputs | None:
    """What holds for an answer; None where anything may be said. Raises as :func:`constraint`."""
    must_call = use is not None and use.must_call
    is_strict = use is not None and any(tool.strict for tool in use.tools)
    begun = HarmonyParser(harmony)
    if not must_call and begun.place is HarmonyPlace.WORDS:  # the final message goes on
        return response
    if not must_call and response is None and not is_strict:
        return None
    shape = ANY_TEXT if response is None else shape_form(response)
    endings = [_call(tool, must_call) for tool in use.tools] if use else []
    if not must_call:
        endings.append(sequence(const(f"{CHANNEL}final{MESSAGE}"), shape))
    before = star(one_of(map(_message, ("analysis", "commentary"))))
    form = sequence(*_rest_of(begun), before, one_of(endings))
    return StructuredOutputs(structural_tag={"format": form}, composed=True)


def _rest_of(begun: HarmonyParser) -> list[Form]:
    if begun.place is HarmonyPlace.HEAD:
        return [] if begun.has_start else [const(ASSISTANT)]
    return [ANY_TEXT, const(END + ASSISTANT)]


def _message(channel: str) -> Form:
    return tag(f"{CHANNEL}{channel}{MESSAGE}", ANY_TEXT, END + ASSISTANT)


def _call(tool: OfferedTool, must_call: bool) -> Form:
    """Models name the recipient behind the channel, and templates before it."""
    to, kind = f" to={FUNCTIONS}{tool.name}", f" <|constrain|>json{MESSAGE}"
    heads = f"{CHANNEL}commentary{to}{kind}", f"{to}{CHANNEL}commentary{kind}"
    schema = tool.schema if must_call or tool.strict else ANY_OBJECT
    return sequence(one_of(map(const, heads)), json_of(schema))
