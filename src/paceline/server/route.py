"""Endpoints that read their request and make their response themselves.

Owns what FastAPI does around them, which is nothing: it documents them, but has no parameters to
solve and no result to validate. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class PlainRoute(APIRoute):
    """Of an endpoint that takes the request alone and returns a response."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint
