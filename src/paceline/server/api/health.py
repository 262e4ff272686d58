"""What a server says of itself: models, version, ``/health``, ``/metrics``, ``/stats``.

And the prefix cache emptied.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.server.errors import SERVER, ApiError
from paceline.server.metrics import CONTENT_TYPE
from paceline.server.openapi import errors
from paceline.server.protocol.answers import Health, ModelCard, ModelList, ModelMeta, Version
from paceline.server.protocol.common import ErrorBody
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


@router.get("/models", include_in_schema=False)
@router.get("/v1/models", responses=errors())
async def models(request: Request) -> ModelList:
    serving = Serving.of(request)
    return ModelList(data=[_card(serving, name) for name in serving.names])


# A name can hold a slash, as those of the hub do.
@router.get("/v1/models/{model:path}", responses=errors(404))
async def model(request: Request, model: str) -> ModelCard:
    serving = Serving.of(request)
    return _card(serving, serving.model_name(model))


def _card(serving: Serving, name: str) -> ModelCard:
    info = serving.client.info
    return ModelCard(
        id=name,
        created=serving.created,
        root=info.model,
        max_model_len=info.max_model_len,
        promise="identical" if info.promises_identity else "up to rounding",
        proposers=list(info.proposers),
        dtype=info.dtype,
        backend=info.backend,
        architecture=info.architecture,
        meta=ModelMeta(
            n_vocab=info.vocab_size,
            n_embd=info.hidden_size,
            n_params=info.num_weights,
            size=info.num_bytes,
        ),
    )


@router.get("/version", responses=errors())
async def version() -> Version:
    return Version(version=__version__)
