"""How an answer ends whose replica is gone, in the form that its API has for errors."""

from __future__ import annotations

from starlette.responses import Response

from paceline.server.anthropic import messages as anthropic
from paceline.server.http.errors import error_event, is_anthropic, is_ollama, to_api_error
from paceline.server.http.sse import encode_json, event

_RESPONSES = ("/v1/responses", "/responses")


def refusal(path: str, error: BaseException) -> Response:
    """The answer to a request of which nothing has been answered yet."""
    return to_api_error(error).response(path)


def last_words(path: str, error: BaseException) -> bytes:
    """The end of a stream that has begun."""
    told = to_api_error(error)
    if is_ollama(path):
        return encode_json({"error": told.message}) + b"\n"
    if is_anthropic(path):
        return anthropic.error_event(error)
    if path in _RESPONSES:
        said = {"type": "error", "code": told.code, "message": told.message, "param": told.param}
        return b"event: error\n" + event(said)
    return error_event(error)
