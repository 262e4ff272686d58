"""What an answer must match by ``response_format`` or ``structured_outputs``.

Owns what is left out of schemas, and which field of a request an error is laid to. Compiles
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from paceline.core.errors import BusyError, RequestError
from paceline.json_schema.enforceable import Enforceable, enforceable
from paceline.json_schema.normal_form import normal_form
from paceline.request.structured_outputs import StructuredOutputs
from paceline.server.http.errors import ApiError
from paceline.server.protocol.chat import ChatCompletionRequest
from paceline.server.protocol.completions import CompletionRequest
from paceline.server.protocol.generation import GUIDED, ResponseFormat, StructuredOutputFields

STRUCTURED = "structured_outputs"
CLOSING = "additionalProperties"
"""What objects are closed with: nothing is lost that a schema says, where it does not say this."""
# Where in a composed grammar its compiler stopped, and the lines around that place.
_COMPOSED = re.compile(r"^at \d+\(\d+\): | \d+ \| .*", re.DOTALL)
_COMPOSED_PART = re.compile(r"^format\.[\w.]+: (?:Value error, )?")


def shape_param(body: ChatCompletionRequest | CompletionRequest) -> str | None:
    """The field that asks for a shape."""
    if body.structured_outputs is not None:
        return next((name for name in GUIDED if getattr(body, name) is not None), STRUCTURED)
    wish = body.response_format
    return None if wish is None or wish.type == "text" else "response_format"


def response_shape(
    body: ChatCompletionRequest | CompletionRequest,
) -> tuple[StructuredOutputs | None, tuple[str, ...]]:
    """What the body asks for, and the keywords of its schema that cannot be enforced.

    Raises:
        ApiError: both fields ask, one is malformed, or it is strict and cannot be enforced.
    """
    param = shape_param(body)
    try:
        told = _told(body.structured_outputs)
        if param != "response_format":
            wish = body.response_format
            if told is not None and wish is not None and wish.type != "text":
                raise RequestError(
                    "structured_outputs is given together with response_format; use one of them"
                )
            return told, ()
        assert body.response_format is not None
        return _formatted(body.response_format)
    except RequestError as error:
        raise blamed(error, param) from error


def _formatted(wish: ResponseFormat) -> tuple[StructuredOutputs, tuple[str, ...]]:
    if wish.type == "structural_tag":
        return StructuredOutputs(structural_tag=wish.structural_tag), ()
    if wish.json_schema is None and wish.schema_ is None:
        return StructuredOutputs(json_object=True), ()
    given = wish.schema_ if wish.json_schema is None else wish.json_schema.schema_
    strict = wish.json_schema is not None and wish.json_schema.strict is True
    found = enforced(given, strict, "response_format")
    return StructuredOutputs(json=found.schema, composed=True), found.unenforced


def enforced(
    schema: Mapping[str, Any] | None,
    strict: bool,
    param: str,
    more: Callable[[Mapping[str, Any]], Collection[str]] | None = None,
) -> Enforceable:
    """A schema that holds, without what cannot be enforced.

    Args:
        more: the keywords of a schema that the answer's format leaves out besides.

    Raises:
        ApiError: it is malformed or too large, or it is strict and something is left out.
    """
    try:
        StructuredOutputs(json=schema)
    except RequestError as error:
        raise blamed(error, param) from error
    found = enforceable(normal_form(schema))
    left = {*found.unenforced}
    if more is not None and found.schema is not None:
        try:
            left.update(more(found.schema))
        except RequestError as error:
            raise blamed(error, param) from error
    if not _has_key(schema, CLOSING):
        left.discard(CLOSING)
    found = Enforceable(found.schema, tuple(sorted(left)))
    if strict and found.unenforced:
        raise ApiError(
            400,
            f"{param} is strict, and {', '.join(found.unenforced)} cannot be enforced: leave them "
            "out, or strict, without which they are annotations",
            param=param,
        )
    return found


def _has_key(value: Any, key: str) -> bool:
    """Whether an object has the key anywhere in it."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            if key in node:
                return True
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return False


def _told(fields: StructuredOutputFields | None) -> StructuredOutputs | None:
    """What the output must match; None where nothing is said.

    Raises:
        RequestError: several are said at once.
    """
    given = {
        name.rstrip("_"): value
        for name, value in fields or ()  # not as a dump, which copies what can be very large
        if value is not None and value is not False
    }
    if not given:
        return None
    if len(given) > 1:
        raise RequestError(f"structured_outputs has {', '.join(given)}; give exactly one of them")
    return StructuredOutputs(**given)


def blamed(error: RequestError, param: str | None) -> RequestError | ApiError:
    """The error with the field of the request that it is about, if it is about a grammar."""
    message = str(error)
    is_about = message.startswith("structured_outputs") and not isinstance(error, BusyError)
    if param is None or not is_about:
        return error
    if param != STRUCTURED:  # the caller has not seen the grammar that was composed
        reason = _COMPOSED.sub("", message.partition(": ")[2])
        if param.startswith("tools"):
            reason = _COMPOSED_PART.sub("", reason)
        reason = reason or f"its grammar {message.partition(' ')[2]}"
        message = f"{param} cannot be served: {reason}"
    return ApiError(400, message, param=param)
