"""What a chat request demands of its answer: tools that may or must be called, and its shape.

Owns the way from the fields of the request to a grammar, and which field an error is laid to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import RequestError
from paceline.json_schema.normal_form import normal_form
from paceline.request.structured_outputs import StructuredOutputs, ThoughtMarks
from paceline.server.chat.answer import AnswerParser
from paceline.server.chat.calls.format import ToolFormat
from paceline.server.chat.constraints import ANY_OBJECT, constraint
from paceline.server.chat.harmony import Harmony, HarmonyParser
from paceline.server.chat.harmony_shapes import harmony_constraint
from paceline.server.chat.shapes import blamed, enforced, response_shape, shape_param
from paceline.server.chat.tool_calls import OfferedTool, ToolUse
from paceline.server.chat.wrapping import Wrapping
from paceline.server.http.errors import ApiError
from paceline.server.protocol.chat import ChatCompletionRequest, FunctionDefinition, NamedTool

_NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_COMBINERS = ("$ref", "anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class Demands:
    """What holds for every sample of one answer.

    Attributes:
        thoughts: marks of those that it may begin with; None where there are none. Or the format in
            which all of the answer is.
        wrapping: marks around what follows the thoughts; None where there are none.
        grammar: what follows the thoughts must match it; None where anything may be said.
        shows_thoughts: thoughts and their marks are told as words of the answer.
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
    ) -> Demands:
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
                "structured_outputs is given beside a tool_choice that forces a call; use one of "
                "them",
                param="structured_outputs",
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
    choice, functions = body.tool_choice, enumerate(tool.function for tool in body.tools)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        chosen = [_offered(i, each, form, True) for i, each in functions if each.name == name]
        return ToolUse(form, chosen, must_call=True, max_calls=1)
    must_call = choice == "required"
    offered = [_offered(i, each, form, must_call) for i, each in functions]
    max_calls = 1 if body.parallel_tool_calls is False else None
    return ToolUse(form, offered, must_call, max_calls)


def _offered(
    index: int, function: FunctionDefinition, form: ToolFormat | None, must_call: bool
) -> OfferedTool:
    """
    Raises:
        ApiError: its parameters are of no object, or hold for calls and cannot be enforced.
    """
    param = f"tools.{index}.function.parameters"
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
    found = enforced(schema, strict, param, form.call.unenforced if form is not None else None)
    return OfferedTool(function.name, found.schema, strict, found.unenforced)
