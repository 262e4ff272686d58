"""What a chat request demands of its answer: tools that may or must be called, and its shape.

Owns the way from the fields of the request to a grammar, and which field an error is laid to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import RequestError
from paceline.server.chat.answer import AnswerParser
from paceline.server.chat.constraints import (
    ANY_OBJECT,
    OfferedTool,
    ToolUse,
    constraint,
)
from paceline.server.chat.enforceable import Enforceable, enforceable
from paceline.server.chat.tool_formats import ToolFormat
from paceline.server.errors import ApiError
from paceline.server.protocol.chat import ChatCompletionRequest, FunctionDefinition, NamedTool
from paceline.server.sampling import structured_outputs
from paceline.structured_outputs import StructuredOutputs, ThoughtMarks

_NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
# Where in a composed grammar its compiler stopped, and the lines around that place.
_COMPOSED = re.compile(r"^at \d+\(\d+\): | \d+ \| .*", re.DOTALL)
_COMBINERS = ("$ref", "anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class Demands:
    """What holds for every sample of one answer.

    Attributes:
        thoughts: marks of those that it may begin with; None where there are none.
        grammar: what follows the thoughts must match it; None where anything may be said.
        param: the field of the request that an error in the grammar is laid to.
        unenforced: keywords of the schema that holds which could not be enforced.
    """

    thoughts: ThoughtMarks | None
    tool_use: ToolUse | None
    grammar: StructuredOutputs | None
    param: str | None
    unenforced: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, body: ChatCompletionRequest, form: ToolFormat | None, thoughts: ThoughtMarks | None
    ) -> Demands:
        """
        Args:
            form: how the model writes calls; None where that is not known.

        Raises:
            ApiError: tools or a response format cannot be served, or exclude each other.
        """
        use = _tool_use(body, form)
        param = _param(body, use)
        if param == "tools" and body.structured_outputs is not None:
            raise ApiError(
                400,
                "structured_outputs is given beside a tool_choice that forces a call; use one of "
                "them",
                param="structured_outputs",
            )
        try:
            shape, unenforced = _response_shape(body)
            grammar = constraint(use, shape, thoughts)
        except RequestError as error:
            raise blamed(error, param) from error
        if use is not None and use.must_call:
            unenforced = tuple(sorted({key for tool in use.tools for key in tool.unenforced}))
        return cls(thoughts, use, grammar, param if grammar is not None else None, unenforced)

    def parser(self) -> AnswerParser:
        """A parser for one sample."""
        return AnswerParser(self.thoughts, self.tool_use)


def blamed(error: RequestError, param: str | None) -> RequestError | ApiError:
    """The error with the field of the request that it is about, if it is about a grammar."""
    message = str(error)
    if param is None or not message.startswith("structured_outputs"):
        return error
    if param != "structured_outputs":  # the caller has not seen the grammar that was composed
        reason = _COMPOSED.sub("", message.partition(": ")[2]) or message
        message = f"{param} cannot be served: {reason}"
    return ApiError(400, message, param=param)


def _param(body: ChatCompletionRequest, use: ToolUse | None) -> str:
    if use is not None and use.must_call:
        return "tools"
    if body.structured_outputs is not None:
        return "structured_outputs"
    shaped = body.response_format is not None and body.response_format.type != "text"
    return "response_format" if shaped else "tools"


def _response_shape(
    body: ChatCompletionRequest,
) -> tuple[StructuredOutputs | None, tuple[str, ...]]:
    """What ``response_format`` or ``structured_outputs`` asks for, and what of it is left out.

    Raises:
        RequestError: both ask, it is malformed, or it is strict and cannot be enforced.
    """
    wish, own = body.response_format, body.structured_outputs
    told = structured_outputs(own)
    if wish is None or wish.type == "text":
        return told, ()
    if told is not None:
        raise RequestError("structured_outputs is given beside response_format; use one of them")
    if wish.json_schema is None and wish.schema_ is None:
        return StructuredOutputs(json_object=True), ()
    given = wish.schema_ if wish.json_schema is None else wish.json_schema.schema_
    strict = wish.json_schema is not None and wish.json_schema.strict is True
    found = _enforced(given, strict, "response_format")
    return StructuredOutputs(json=found.schema), found.unenforced


def _enforced(schema: Mapping[str, Any] | None, strict: bool, param: str) -> Enforceable:
    """A schema that holds, without what cannot be enforced.

    Raises:
        ApiError: it is malformed or too large, or it is strict and something is left out.
    """
    try:
        StructuredOutputs(json=schema)
    except RequestError as error:
        raise blamed(error, param) from error
    found = enforceable(schema)
    if strict and found.unenforced:
        raise ApiError(
            400,
            f"{param} is strict, and {', '.join(found.unenforced)} cannot be enforced: leave them "
            "out, or strict, without which they are annotations",
            param=param,
        )
    return found


def _tool_use(body: ChatCompletionRequest, form: ToolFormat | None) -> ToolUse | None:
    if not body.tools or body.tool_choice == "none":
        return None
    if form is None:
        raise ApiError(
            400,
            "tools cannot be served: the model's chat template shows no format of tool calls that "
            "is known here; start the server with --tool-call-parser hermes or llama if the model "
            "writes one of these",
            param="tools",
        )
    choice, functions = body.tool_choice, enumerate(tool.function for tool in body.tools)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        chosen = [_offered(i, each, True) for i, each in functions if each.name == name]
        return ToolUse(form, chosen, must_call=True, max_calls=1)
    must_call = choice == "required"
    offered = [_offered(i, each, must_call) for i, each in functions]
    max_calls = 1 if body.parallel_tool_calls is False else None
    return ToolUse(form, offered, must_call, max_calls)


def _offered(index: int, function: FunctionDefinition, must_call: bool) -> OfferedTool:
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
        return OfferedTool(function.name, schema)
    found = _enforced(schema, strict, param)
    return OfferedTool(function.name, found.schema, strict, found.unenforced)
