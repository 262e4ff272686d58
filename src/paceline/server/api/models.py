"""``GET /v1/models``, one model of it, and ``GET /version``."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from paceline import __version__
from paceline.server.openapi import errors
from paceline.server.protocol.models import ModelCard, ModelList, Version
from paceline.server.serving import Serving

router = APIRouter()


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
    )


@router.get("/version", responses=errors())
async def version() -> Version:
    return Version(version=__version__)
