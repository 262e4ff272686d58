"""Bodies of requests: JSON, read and checked. Knows no endpoint; how large a body may be is
:mod:`paceline.server.security`'s.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from paceline.server.errors import ApiError
from paceline.server.protocol.common import ApiModel
from paceline.server.sse import ClientGoneError

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=ApiModel)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The request's body as a model.

    Raises:
        ApiError: 415, the body is not said to be JSON. A page of another origin can send a browser
            here without asking only with other types.
        ApiError: 400, it is no JSON, or nests deeper than 200 levels.
        ValidationError: it is not what the model says.
        ClientGoneError: the client left before all of it had arrived.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"the body's type is {kind[:60] or 'not given'}; it must be application/json"
        )
    try:
        raw = await request.body()
    except ClientDisconnect as error:
        raise ClientGoneError("the client left before its request was complete") from error
    try:
        value: Any = from_json(raw, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no valid JSON: {error}", code="invalid_json") from error
    ignored: set[str] = set()
    found = model.model_validate(value, context=ignored)
    if ignored:
        log.debug("ignored unknown keys inside a body: %s", ", ".join(sorted(ignored)))
    return found
