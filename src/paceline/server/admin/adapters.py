"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: adapters come and go, as in vLLM.

Owns their bodies, and when they are refused. Requests choose an adapter by ``model``.
"""

from __future__ import annotations

import os

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from paceline.core.errors import ModelLoadError, NoAdapterError
from paceline.core.files import read_as
from paceline.server.hosting.answering import received
from paceline.server.hosting.models import Models
from paceline.server.http.errors import NOT_FOUND, ApiError
from paceline.server.http.openapi import BODY_ERRORS, posts
from paceline.server.protocol.generation import ApiModel


class LoadAdapterRequest(ApiModel):
    """``lora_path`` is a folder on the server's machine; ``model`` the adapter's, the first where
    it is not given."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterRequest(ApiModel):
    """``lora_int_id`` is vLLM's own number of an adapter, which is not needed."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None


router = APIRouter()
_STATUSES = (*BODY_ERRORS, 403, 500, 503)


@posts(
    router,
    LoadAdapterRequest,
    "/v1/load_lora_adapter",
    statuses=_STATUSES,
    response_class=PlainTextResponse,
)
async def load_lora_adapter(request: Request) -> Response:
    _check_allowed(request)
    serving, body, _ = await received(request, LoadAdapterRequest)
    models, name, client = Models.of(request), body.lora_name, serving.client
    taken = name in models.names or any(
        name in each.client.adapters
        for each in models.all
        if each is not serving or not body.load_inplace
    )
    if taken:
        raise ApiError(
            400,
            f"lora_name is {name[:100]!r}, which is the name of a model or an adapter that is "
            "served; choose another one, or unload that first",
            param="lora_name",
        )
    async with serving.using():
        serving.check_takes_requests()
        try:
            folder = _absolute(body.lora_path)
            await client.load_adapter(name, folder, body.load_inplace)
        except NoAdapterError as error:
            raise ApiError(404, str(error), NOT_FOUND, param="lora_path") from error
        except ModelLoadError as error:
            raise ApiError(400, str(error), param="lora_path") from error
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


def _absolute(path: str) -> str:
    """Where an engine finds it that is started somewhere else."""
    with read_as(ModelLoadError, path):  # the folder that the server was started in may be gone
        return os.path.abspath(os.path.expanduser(path))


@posts(
    router,
    UnloadAdapterRequest,
    "/v1/unload_lora_adapter",
    statuses=_STATUSES,
    response_class=PlainTextResponse,
)
async def unload_lora_adapter(request: Request) -> Response:
    _check_allowed(request)
    _, body, _ = await received(request, UnloadAdapterRequest)
    name = body.lora_name
    serving = Models.of(request).of_adapter(name)
    if serving is None:
        raise ApiError(404, f"no adapter {name[:100]!r} is loaded", NOT_FOUND, param="lora_name")
    await serving.client.unload_adapter(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _check_allowed(request: Request) -> None:
    """Raises ApiError: 403, whoever may send requests may not have files of this machine read."""
    if not Models.of(request).config.allow_runtime_lora_updating:
        raise ApiError(
            403,
            "adapters are those that the server was started with; "
            "--allow-runtime-lora-updating lets requests load and unload them",
            code="lora_updating_not_allowed",
        )
