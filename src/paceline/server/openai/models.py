"""``GET /v1/models`` and ``/v1/models/NAME``: the models and adapters that are served."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from paceline.request.sampling_params import NEUTRAL
from paceline.server.hosting.models import Models
from paceline.server.hosting.serving import Serving
from paceline.server.http.openapi import errors

router = APIRouter()


class ModelMeta(BaseModel):
    """The model's size under llama.cpp's names; ``size`` is in bytes, as the weights are stored."""

    n_vocab: int
    n_embd: int
    n_params: int
    size: int


class Sampling(BaseModel):
    """How a request that says nothing is sampled, and whose choice that is."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    source: str


class ModelCard(BaseModel):
    """One name under which the model is served, or an adapter of the model ``parent``.

    ``promise`` says whether answers with speculation are those of plain decoding bit for bit, or
    up to rounding, where near-ties can fall otherwise. What only a loaded model tells is null until
    it was loaded for the first time.

    ``state`` is ``unloaded``, ``loading`` or ``leaving``, and of a loaded model its engine's:
    ``ready``, ``starting``, ``hung``, ``draining`` or ``failed``. ``pooling`` is that of embeddings
    whose requests do not say.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["paceline"] = "paceline"
    root: str
    parent: str | None = None
    state: str
    max_model_len: int | None = None
    promise: Literal["identical", "up to rounding"] | None = None
    proposers: list[str] | None = None
    dtype: str | None = None
    backend: str | None = None
    architecture: str | None = None
    pooling: str | None = None
    meta: ModelMeta | None = None
    sampling: Sampling | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/models", include_in_schema=False)
@router.get("/v1/models", responses=errors())
async def models(request: Request) -> ModelList:
    models = Models.of(request)
    cards = [_card(models.find(name), name) for name in models.names]
    adapted = [_card(each, name) for each in models.all for name in each.client.adapters]
    return ModelList(data=cards + adapted)


# A name can hold a slash, as those of the hub do.
@router.get("/models/{model:path}", include_in_schema=False)
@router.get("/v1/models/{model:path}", responses=errors(404))
async def model(request: Request, model: str) -> ModelCard:
    return _card(Models.of(request).find(model), model)


def _card(serving: Serving, name: str) -> ModelCard:
    card = ModelCard(id=name, created=serving.created, root=serving.name, state=serving.state)
    if not serving.is_known:
        return card
    info = serving.client.info
    facts = {
        "root": info.model,
        "max_model_len": info.max_model_len,
        "promise": "identical" if info.promises_identity else "up to rounding",
        "proposers": list(info.proposers),
        "dtype": info.dtype,
        "backend": info.backend,
        "architecture": info.architecture,
        "pooling": serving.pooling,
        "sampling": Sampling.model_validate(
            {**NEUTRAL, **info.sampling.values, "source": info.sampling.source}
        ),
        "meta": ModelMeta(
            n_vocab=info.vocab_size,
            n_embd=info.hidden_size,
            n_params=info.num_weights,
            size=info.num_bytes,
        ),
    }
    adapter = serving.adapter_of(name)
    if adapter is not None:
        facts |= {"root": serving.client.adapters[adapter], "parent": serving.name}
    return card.model_copy(update=facts)
