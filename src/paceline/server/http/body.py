"""Bodies of requests: JSON, read and checked. Knows no endpoint; how large a body may be is
:mod:`paceline.server.http.security`'s.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from paceline.server.http.errors import ApiError
from paceline.server.http.sse import ClientGoneError
from paceline.server.protocol.generation import ApiModel

_LARGE_NUMBER = re.compile(rb"[eE]\+?\d{2}|(?<!\d)\d{200}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
CURLS = "application/x-www-form-urlencoded"
log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=ApiModel)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The request's body as a model.

    Raises:
        ApiError: 415, the body is said to be something else than JSON. A page of another origin
            can send a browser here without asking only with other types or none. No type, and the
            one that curl and wget write unless told otherwise, are taken unless a page sends them,
            whose origin a browser tells.
        ApiError: 400, it is not valid JSON, or nests deeper than 200 levels, or a number overflows.
        ValidationError: it is not what the model says.
        ClientGoneError: the client left before all of it had arrived.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_a_pages = "origin" in request.headers
    if kind != "application/json" and (is_a_pages or kind not in ("", CURLS)):
        raise ApiError(
            415, f"the body's type is {kind[:60] or 'not given'}; it must be application/json"
        )
    try:
        raw = await request.body()
    except ClientDisconnect as error:
        raise ClientGoneError("the client left before its request was complete") from error
    value = _parsed(raw)
    ignored: set[str] = set()
    found = model.model_validate(value, context=ignored)
    if ignored:
        log.debug("ignored unknown keys inside a body: %s", ", ".join(sorted(ignored)))
    return found


def _parsed(raw: bytes) -> Any:
    """The JSON value of a body; ``ApiError`` 400 where it, a number or a character is none."""
    try:
        value: Any = from_json(raw, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        half = " (half of a surrogate pair is no character)" if _has_half_pair(raw, error) else ""
        raise _invalid(f"{error}{half}") from error
    # The parser reads 1e999 as infinity. Only such numbers make it worth looking for one.
    if _LARGE_NUMBER.search(raw) and not _is_finite(value):
        raise _invalid(f"a number is beyond what a double holds, {sys.float_info.max:.4g}")
    return value


def _has_half_pair(raw: bytes, error: ValueError) -> bool:
    return "hex escape" in str(error) and _SURROGATE.search(raw) is not None


def _is_finite(value: Any) -> bool:
    """Whether no number in a JSON value, at whatever depth, is infinite."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
        elif isinstance(value, float) and math.isinf(value):
            return False
    return True


def _invalid(problem: str) -> ApiError:
    return ApiError(400, f"the body is no valid JSON: {problem}", code="invalid_json")
