"""How the server is: ``/health``, ``/metrics``, ``/stats``; and the prefix cache emptied."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.errors import SERVER, ApiError
from paceline.server.metrics import CONTENT_TYPE
from paceline.server.openapi import errors
from paceline.server.protocol.common import ErrorBody
from paceline.server.protocol.models import Health
from paceline.server.security import refuse_foreign_page
from paceline.server.serving import Serving
from paceline.server.sse import encode_json
from paceline.server.stats import engine_stats, snapshot

router = APIRouter()


@router.get(
    "/health",
    responses={503: {"model": ErrorBody, "description": "The server is not ready, or ending."}},
)
async def health(request: Request) -> Health:
    state = Serving.of(request).client.state
    if state != "ready":
        raise ApiError(503, f"the server is {state}", SERVER, code=state)
    return Health(status=state)


@router.get("/metrics", responses=errors(), response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    serving = Serving.of(request)
    stats = await engine_stats(serving.client)
    text = serving.metrics.render(stats, serving.client)
    return Response(text, headers={"content-type": CONTENT_TYPE})


@router.get("/stats", responses=errors(), response_model=dict[str, Any])
async def stats(request: Request) -> Response:
    document = await snapshot(Serving.of(request).client)
    return Response(encode_json(document), media_type="application/json")


@router.post("/flush_prefix_cache", responses=errors(403, 500, 503))
@router.post("/reset_prefix_cache", responses=errors(403, 500, 503))
async def flush_prefix_cache(request: Request) -> Health:
    serving = Serving.of(request)
    refuse_foreign_page(request.headers, serving.config.allowed_origins)
    serving.check_takes_requests()
    await serving.client.flush_prefix_cache()
    return Health(status="flushed")
