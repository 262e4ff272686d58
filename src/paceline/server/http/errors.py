"""What goes wrong as answers that are errors: which status, type, parameter and code.

Owns the mapping from Paceline's exceptions to HTTP, which path belongs to which API, and how each
API writes its errors. Knows no endpoint. A body never holds a traceback: what nobody foresaw is one
sentence for the client and a traceback in the log.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from paceline.core.errors import (
    AnswerTooLargeError,
    BusyError,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    ModelTooLargeError,
    ModelUnavailableError,
    PacelineError,
    RequestError,
    RequestFailedError,
    SlowReaderError,
    UnknownAdapterError,
    UnservableRequestError,
)
from paceline.server.http.sse import DONE, ClientGoneError, encode_json, event
from paceline.server.http.tracing import REQUEST_ID, current_request_id

log = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
AUTHENTICATION = "authentication_error"
NOT_FOUND = "not_found_error"
RATE_LIMIT = "rate_limit_error"
SERVER = "server_error"

_MAX_SHOWN = 60
_OF_THE_ROUTER = ("Not Found", "Method Not Allowed")


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what was wrong, what is allowed, what to do.
        type: one of OpenAI's error types.
        param: the field of the request that is at fault.
        code: for programs, where the type does not say enough.
        headers: of the response, such as ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self, path: str = "") -> dict[str, Any]:
        """As the API has it that a request's path belongs to; without a path as OpenAI has it."""
        fields = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return error_document(path, self.status, fields)

    def response(self, path: str) -> Response:
        """The answer to a request of this path."""
        body = encode_json(self.body(path))
        return Response(body, self.status, self.headers, media_type="application/json")


_AGAIN = {"Retry-After": "5"}
_ANSWERS: Mapping[type[PacelineError], tuple[int, str, Mapping[str, str]]] = {
    RequestError: (400, INVALID_REQUEST, {}),
    ConfigError: (400, INVALID_REQUEST, {}),
    UnknownAdapterError: (404, NOT_FOUND, {}),  # it was unloaded a moment ago
    BusyError: (503, SERVER, _AGAIN),
    ModelUnavailableError: (500, SERVER, _AGAIN),
    ModelTooLargeError: (400, INVALID_REQUEST, {}),
    EngineClosedError: (503, SERVER, {}),
    EngineDeadError: (500, SERVER, {}),
    RequestFailedError: (500, SERVER, {}),
    UnservableRequestError: (400, INVALID_REQUEST, {}),
    SlowReaderError: (408, INVALID_REQUEST, {}),
    AnswerTooLargeError: (400, INVALID_REQUEST, {}),
}
"""Status, type and headers of errors and of their subclasses."""


def to_api_error(error: BaseException) -> ApiError:
    """The answer to an exception; one that is not expected here is logged with its traceback."""
    match error:
        case ApiError():
            return error
        case PacelineError():
            for base in type(error).__mro__:
                if base in _ANSWERS:
                    status, type_, headers = _ANSWERS[base]
                    return ApiError(status, str(error), type_, error.param, error.code, headers)
        case ValidationError():
            return _validation_error(error)
        case HTTPException():
            return _http_error(error)
        case TimeoutError():
            return ApiError(504, str(error), SERVER, code="request_timeout")
        case ClientGoneError():  # for the logs of proxies: the client reads nothing any more
            return ApiError(499, str(error), code="client_closed_request")
    log.error("request %s failed unexpectedly", current_request_id(), exc_info=error)
    return ApiError(500, "the server failed; its log says how", SERVER, code="internal_error")


def error_event(error: BaseException) -> bytes:
    """The end of a stream that failed: the error as an event, then ``[DONE]``."""
    return event(to_api_error(error).body()) + DONE


def _http_error(error: HTTPException) -> ApiError:
    """Errors of the router itself, such as a path that does not exist."""
    kind = NOT_FOUND if error.status_code == 404 else INVALID_REQUEST
    kind = SERVER if error.status_code >= 500 else kind
    return ApiError(error.status_code, str(error.detail), kind, headers=error.headers)


def _validation_error(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body; the innermost where several types were tried."""
    details = error.errors(include_url=False)
    first = _first(details)
    place, value = _place(first), first.get("input")
    match first["type"]:
        case "value_error":
            cause = first["ctx"]["error"]
            return ApiError(400, str(cause), param=place or getattr(cause, "param", None))
        case "extra_forbidden":
            message = f"unknown field {place!r}"
        case kind if kind == "missing" or _lacks_type(first):
            message = f"{place} is missing"
        case "model_type" | "dict_type" if not place:
            message = f"the body is {_shown(value)}; it must be a JSON object"
        case _:
            tried = [detail for detail in details if _place(detail) == place]
            message = f"{place} is {_shown(value)}; {_reason(first, tried)}"
    return ApiError(400, message, param=place or None)


def _first(details: Sequence[ErrorDetails]) -> ErrorDetails:
    """Of equal rank the first; then what is wrong inside of it, for a type that has such a form."""
    first = max(details, key=lambda detail: _rank(detail["type"]))
    inside = [detail for detail in details if _place(detail).startswith(f"{_place(first)}.")]
    return _first(inside) if inside else first


def _place(detail: ErrorDetails) -> str:
    """The field of a problem, with dots, without the branches of unions."""
    parts = [str(part) for part in detail["loc"] if not _is_branch(part)]
    return ".".join([*parts, "type"] if _lacks_type(detail) else parts)


def _lacks_type(detail: ErrorDetails) -> bool:
    """Whether an object does not say which of several forms it has."""
    return detail["type"] == "union_tag_not_found" and isinstance(detail["input"], dict)


_OBJECT, _INTEGER = ("be", "a valid object"), ("be", "a valid integer")
_WANTED: Mapping[str, tuple[str, str]] = {
    "string_type": ("be", "a valid string"),
    "int_type": _INTEGER,
    "int_from_float": _INTEGER,
    "float_type": ("be", "a valid number"),
    "finite_number": ("be", "a finite number"),
    "bool_type": ("be", "a valid boolean"),
    "list_type": ("be", "a valid list"),
    "tuple_type": ("be", "a valid list"),
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "union_tag_not_found": _OBJECT,
    "literal_error": ("be", "{expected}"),
    "greater_than_equal": ("be", "greater than or equal to {ge}"),
    "less_than_equal": ("be", "less than or equal to {le}"),
    "string_pattern_mismatch": ("match", "pattern '{pattern}'"),
    "string_too_short": ("have", "at least {min_length} character{s}"),
    "string_too_long": ("have", "at most {max_length} character{s}"),
    "too_short": ("have", "at least {min_length} item{s}"),
    "too_long": ("have", "at most {max_length} item{s}"),
}
"""What a value should be or have that pydantic refuses, by the types of its errors."""


def _reason(first: ErrorDetails, tried: Sequence[ErrorDetails]) -> str:
    """What a value should be; all that it may be where several types were tried in vain.

    Of a value that has a right type and is out of range, the other types are not told.
    """
    if first["type"] not in _WANTED:
        return first["msg"]
    has_a_type = not first["type"].endswith(("_type", "literal_error"))
    wanted = dict.fromkeys(
        (_WANTED[detail["type"]][0], _limit(detail))
        for detail in tried
        if detail["type"] in _WANTED and not (has_a_type and detail["type"].endswith("_type"))
    )
    parts, verb = [], ""
    for own_verb, limit in wanted:
        parts.append(limit if own_verb == verb else f"{own_verb} {limit}")
        verb = own_verb
    return f"it should {', or '.join(parts)}"


def _limit(detail: ErrorDetails) -> str:
    """What kind of value is wanted, or which bound a value breaks."""
    bounds = {name: _as_json_has_it(value) for name, value in detail.get("ctx", {}).items()}
    s = "" if 1 in (bounds.get("min_length"), bounds.get("max_length")) else "s"
    return _WANTED[detail["type"]][1].format(**bounds, s=s)


def _as_json_has_it(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _rank(kind: str) -> int:
    """A value out of range says more than a type that one branch of a union tried in vain."""
    if kind in ("extra_forbidden", "value_error"):
        return 2
    return 0 if kind.endswith("_type") else 1


def _is_branch(part: str | int) -> bool:
    """Whether a part of a location names a branch of a union rather than a field."""
    return isinstance(part, str) and (
        "[" in part or "-" in part or part in {"str", "int", "float", "bool", "dict"}
    )


def _shown(value: object) -> str:
    text = encode_json(value).decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def install_error_handlers(app: Starlette, routes: Sequence[Route]) -> None:
    """Let every exception of an endpoint become an answer in the form of its API.

    Args:
        routes: of the endpoints, for those who ask for another one.
    """

    async def answer(request: Request, error: Exception) -> Response:
        api_error = to_api_error(error)
        if isinstance(error, HTTPException) and error.detail in _OF_THE_ROUTER:
            api_error.message = _misdirected(request, api_error, routes)
        response = api_error.response(request.scope["path"])
        if current_request_id():  # what failed unexpectedly is answered outside of all layers
            response.headers[REQUEST_ID] = current_request_id()
        return response

    expected = (ApiError, PacelineError, ValidationError, HTTPException, TimeoutError)
    for kind in (*expected, ClientGoneError, Exception):
        app.add_exception_handler(kind, answer)


def _misdirected(request: Request, error: ApiError, routes: Sequence[Route]) -> str:
    """What to say of a path, or a method for it, that does not exist."""
    path = request.scope["path"][:_MAX_SHOWN]
    if error.status == 405:
        # The router tells only the methods of the first endpoint that has the path.
        same = [route for route in routes if route.matches(request.scope)[0] is Match.PARTIAL]
        exact = [route for route in same if route.path_format == request.scope["path"]]
        methods = {method for route in exact or same for method in route.methods or ()}
        allowed = error.headers["Allow"] = ", ".join(sorted(methods))
        return f"{request.method[:_MAX_SHOWN]} is not for {path}, which takes {allowed}"
    listed = {
        route.path_format: " or ".join(sorted(route.methods or ()))
        for route in routes
        if route.include_in_schema
    }
    below = [each for each in listed if each.startswith(f"{path.rstrip('/')}/")][:1]
    near = below or get_close_matches(path, listed, n=1) or _ends_alike(path, listed)
    hint = "".join(f"did you mean {listed[each]} {each}? " for each in near)
    return f"there is no {path} here; {hint}GET /openapi.json describes all endpoints"


def _ends_alike(path: str, listed: Iterable[str]) -> list[str]:
    """The endpoint with which a path ends, as where a prefix is doubled or of another server."""
    endings = [each for each in listed if each != "/" and path.endswith(each)]
    return sorted(endings, key=len)[-1:]


OLLAMA_PATHS = "/api/"
"""Where paths of Ollama's API begin."""
_ANTHROPIC_PATH = re.compile(r"(?:/v1)?/messages(?:/|$)")
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_ollama(path: str) -> bool:
    return path.startswith(OLLAMA_PATHS)


def is_anthropic(path: str) -> bool:
    return _ANTHROPIC_PATH.match(path) is not None


def error_document(path: str, status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an error as clients of a path's API read it.

    Args:
        error: ``message``, ``type``, ``param`` and ``code``, as OpenAI has them.
    """
    if is_ollama(path):
        return {"error": error["message"]}
    if is_anthropic(path):
        return anthropic_document(status, error["message"])
    return {"error": dict(error)}


def anthropic_document(status: int, message: str) -> dict[str, Any]:
    """Anthropic's form, which its streams end with as well."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": current_request_id() or None,
    }
