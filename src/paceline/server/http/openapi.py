"""The server's description of itself: what endpoints take and answer, errors included.

Endpoints read their bodies themselves (see :mod:`paceline.server.http.body`), so the models of
bodies are entered here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.server.http.config import OPEN_PATHS
from paceline.server.http.errors import is_anthropic, is_ollama
from paceline.server.http.sse import StreamForm
from paceline.server.protocol.generation import ErrorBody

Endpoint = TypeVar("Endpoint", bound=Callable[[Request], Coroutine[Any, Any, Response]])
_PREFIX = "#/components/schemas/"
_MEANING = {
    400: "The request is not valid, or asks for what cannot be served.",
    401: "The API key is missing or wrong.",
    403: "A page of another origin made the browser call.",
    404: "There is no such model, or nothing kept under that id.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The engine failed.",
    503: "The server is not ready, too busy, or ending.",
    504: "The answer took longer than the server allows.",
}
_ERROR = {"$ref": f"{_PREFIX}{ErrorBody.__name__}"}
_PLAIN_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
        "request_id": {"type": ["string", "null"]},
    },
    "required": ["type", "error", "request_id"],
}
_bodies: dict[str, type[BaseModel]] = {}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of an endpoint that can answer with these errors; 401 always can."""
    return {
        status: {"model": ErrorBody, "description": _MEANING[status]}
        for status in sorted({401, *statuses})
    }


BODY_ERRORS = (400, 404, 408, 413, 415)
"""Of every endpoint that takes a body."""
GENERATION_ERRORS = (*BODY_ERRORS, 429, 500, 503, 504)
"""Of every endpoint that generates."""


class PlainRoute(APIRoute):
    """Of an endpoint that takes the request alone and returns a response."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


def posts(
    router: APIRouter,
    body: type[BaseModel],
    *paths: str,
    answer: Any = None,
    events: StreamForm | None = None,
    statuses: Sequence[int] = (),
    response_class: type[Response] = JSONResponse,
) -> Callable[[Endpoint], Endpoint]:
    """Decorate an endpoint that reads a body itself and returns a response.

    Args:
        paths: where it is; ``/openapi.json`` describes the first.
        answer: the model of what it answers.
        events: the form of a stream of such answers, if it can be asked for.
        statuses: of its errors; by default those of a body, and with events of generating.
    """
    _bodies[body.__name__] = body
    schema = {"$ref": f"{_PREFIX}{body.__name__}"}
    content = {"content": {"application/json": {"schema": schema}}}
    responses = errors(*(statuses or (GENERATION_ERRORS if events else BODY_ERRORS)))
    if events:
        # No schema: some readers take it for that of an event, others for that of all of them.
        description = "The answer; with stream: true as events of the same shape."
        responses[200] = {"description": description, "content": {events.media_type: {}}}

    def decorated(endpoint: Endpoint) -> Endpoint:
        for path in paths:
            router.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                response_model=answer,
                response_class=response_class,
                responses=responses,
                openapi_extra={"requestBody": {"required": True, **content}},
                include_in_schema=path == paths[0],
                route_class_override=PlainRoute,
            )
        return endpoint

    return decorated


def install_openapi(app: FastAPI) -> None:
    """Make ``/openapi.json`` complete."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title="Paceline", version=__version__, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    modes: list[Any] = [(model, "validation") for model in _bodies.values()]
    _, definitions = models_json_schema(modes, ref_template=_PREFIX + "{model}")
    schemas.update(definitions.get("$defs", {}))
    # Parameters here are strings, which cannot be invalid.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name, path in document["paths"].items():
        error = _error_schema(name)
        for operation in path.values():
            operation["responses"].pop("422", None)
            for status, response in operation["responses"].items():
                if int(status) >= 400:  # whatever type the endpoint's other answers are of
                    response["content"] = {"application/json": {"schema": error}}
    if app.state.models.config.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in OPEN_PATHS:
            for operation in document["paths"][path].values():
                operation["security"] = []
    return document


def _error_schema(path: str) -> dict[str, Any]:
    if is_ollama(path):
        return _PLAIN_ERROR
    return _ANTHROPIC_ERROR if is_anthropic(path) else _ERROR
