"""The forms in which APIs tell errors: OpenAI's, Anthropic's and Ollama's, by a request's path.

Owns which path belongs to which API and how its error bodies look. Knows no exception: an error
arrives as the fields of OpenAI's form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.server.http.tracing import current_request_id

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
