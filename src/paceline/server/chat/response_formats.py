"""What an answer must match by ``response_format`` or ``structured_outputs``.

Owns what is left out of schemas, and which field of a request an error is laid to. Compiles
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paceline.core.errors import RequestError, ShapeError
from paceline.json_schema.enforceable import enforceable
from paceline.json_schema.normal_form import normal_form
from paceline.request.structured_outputs import StructuredOutputs
from paceline.server.chat.tool_calls.format import ForcedCall
from paceline.server.chat.tool_calls.tag_forms import Form
from paceline.server.http.errors import ApiError
from paceline.server.protocol.chat import ChatCompletionRequest
from paceline.server.protocol.completions import CompletionRequest
from paceline.server.protocol.generation import GUIDED, ResponseFormat, StructuredOutputFields

STRUCTURED = "structured_outputs"
CLOSING = "additionalProperties"
"""What objects are closed with: nothing is lost that a schema says, where it does not say this."""


def shape_param(body: ChatCompletionRequest | CompletionRequest) -> str | None:
    """The field that asks for a shape, as the client calls it."""
    if body.structured_outputs is not None:
        given = next((name for name in GUIDED if getattr(body, name) is not None), STRUCTURED)
        return body.called(given)
    wish = body.response_format
    return None if wish is None or wish.type == "text" else body.called("response_format")


def response_shape(
    body: ChatCompletionRequest | CompletionRequest,
) -> tuple[StructuredOutputs | None, tuple[str, ...]]:
    """What the body asks for, and the keywords of its schema that cannot be enforced. ``ApiError``
    where both fields ask, one is malformed, or it is strict and cannot be enforced.
    """
    param, wish = shape_param(body), body.response_format
    has_format = wish is not None and wish.type != "text"
    try:
        shape = _told(body.structured_outputs)
        if shape is not None and has_format:
            message = f"{param} is given together with response_format; use one of them"
            raise ApiError(400, message, param=param)
        if shape is not None or not has_format:
            return shape, ()
        assert wish is not None
        return _formatted(wish, body.called("response_format"))
    except RequestError as error:
        raise blamed(error, param) from error


def _formatted(wish: ResponseFormat, param: str) -> tuple[StructuredOutputs, tuple[str, ...]]:
    if wish.type == "structural_tag":
        return StructuredOutputs(structural_tag=wish.structural_tag), ()
    if wish.json_schema is None and wish.schema_ is None:
        return StructuredOutputs(json_object=True), ()
    given = wish.schema_ if wish.json_schema is None else wish.json_schema.schema_
    strict = wish.json_schema is not None and wish.json_schema.strict is True
    held = enforced(given, strict, param)
    return StructuredOutputs(json=held.schema, composed=True), held.unenforced


class Enforced(NamedTuple):
    """A schema without what cannot be enforced, the keywords left out, and the tag of a call it
    holds for.
    """

    schema: Any
    unenforced: tuple[str, ...]
    tag: Form | None = None


def enforced(
    schema: Mapping[str, Any] | None,
    strict: bool,
    param: str,
    call: Callable[[Mapping[str, Any]], ForcedCall] | None = None,
) -> Enforced:
    """
    Args:
        call: how a call with such arguments is forced, in a format that may leave out more.

    Raises:
        ApiError: it is malformed or too large, or it is strict and something is left out.
    """
    try:
        text = StructuredOutputs(json=schema).source
        kept = enforceable(normal_form(schema))
        forced = None if call is None or kept.schema is None else call(kept.schema)
    except RequestError as error:
        raise blamed(error, param) from error
    left = {*kept.unenforced, *(forced.unenforced if forced else ())}
    if f'"{CLOSING}":' not in text:
        left.discard(CLOSING)
    unenforced = tuple(sorted(left))
    if strict and unenforced:
        raise ApiError(
            400,
            f"{param} is strict, and {', '.join(unenforced)} cannot be enforced: leave them "
            "out, or strict, without which they are annotations",
            param=param,
        )
    return Enforced(kept.schema, unenforced, forced and forced.tag)


def _told(fields: StructuredOutputFields | None) -> StructuredOutputs | None:
    """What the output must match, or None; ``RequestError`` where several things are asked for."""
    given = {
        name.rstrip("_"): value
        for name, value in fields or ()  # not as a dump, which copies what can be very large
        if value is not None and value is not False
    }
    if not given:
        return None
    if len(given) > 1:
        raise ShapeError("", f"has {', '.join(given)}; give exactly one of them")
    return StructuredOutputs(**given)


def blamed(error: RequestError, param: str | None) -> RequestError | ApiError:
    """The error with the field of the request that it is about, if it is about a shape."""
    if param is None or not isinstance(error, ShapeError):
        return error
    message = str(error)
    if param != STRUCTURED:  # the client does not know the field that the error names
        message = f"{param} cannot be served: {error.reason or f'its grammar {error.problem}'}"
    return ApiError(400, message, param=param)
