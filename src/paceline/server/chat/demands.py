"""What a chat request demands of its answer: tools that may or must be called, and its shape.

Owns the way from the fields of the request to a grammar, and which field an error is laid to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from paceline.errors import RequestError
from paceline.server.chat.answer import AnswerParser
from paceline.server.chat.constraints import (
    ANY_OBJECT,
    OfferedTool,
    Thoughts,
    ToolUse,
    constraint,
)
from paceline.server.chat.tool_formats import ToolFormat
from paceline.server.errors import ApiError
from paceline.server.protocol.chat import ChatCompletionRequest, FunctionDefinition, NamedTool
from paceline.server.sampling import structured_outputs
from paceline.structured_outputs import StructuredOutputs

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
        grammar: what the whole text must match; None where anything may be said.
        param: the field of the request that an error in the grammar is laid to.
    """

    thoughts: Thoughts
    tool_use: ToolUse | None
    grammar: StructuredOutputs | None
    param: str | None

    @classmethod
    def of(
        cls, body: ChatCompletionRequest, form: ToolFormat | None, thoughts: Thoughts
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
            grammar = constraint(use, _response_shape(body), thoughts)
        except RequestError as error:
            raise blamed(error, param) from error
        return cls(thoughts, use, grammar, param if grammar is not None else None)

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


def _response_shape(body: ChatCompletionRequest) -> StructuredOutputs | None:
    """What ``response_format`` or ``structured_outputs`` asks for.

    Raises:
        RequestError: both ask, or it is malformed.
    """
    wish, own = body.response_format, body.structured_outputs
    told = structured_outputs(own)
    if wish is None or wish.type == "text":
        return told
    if told is not None:
        raise RequestError("structured_outputs is given beside response_format; use one of them")
    if wish.json_schema is not None:
        return StructuredOutputs(json=wish.json_schema.schema_)
    if wish.schema_ is not None:
        return StructuredOutputs(json=wish.schema_)
    return StructuredOutputs(json_object=True)


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
    offered = [_offered(i, tool.function) for i, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in offered if tool.name == choice.function.name]
        return ToolUse(form, chosen, must_call=True, max_calls=1)
    max_calls = 1 if body.parallel_tool_calls is False else None
    return ToolUse(form, offered, must_call=choice == "required", max_calls=max_calls)


def _offered(index: int, function: FunctionDefinition) -> OfferedTool:
    schema = _NO_PARAMETERS if function.parameters is None else function.parameters
    kind = schema.get("type")
    if kind is None and not any(key in schema for key in _COMBINERS):
        schema = {**ANY_OBJECT, **schema}
    elif kind not in (None, "object"):
        raise ApiError(
            400,
            f"parameters of {function.name} are of type {str(kind)[:40]!r}; arguments are always "
            "an object",
            param=f"tools.{index}.function.parameters",
        )
    return OfferedTool(function.name, schema, bool(function.strict))
