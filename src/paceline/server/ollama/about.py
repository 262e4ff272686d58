"""What Ollama's clients ask of a server besides answers: its models, and its version.

``GET /api/tags``, ``/api/ps`` and ``/api/version``, ``POST /api/show``. Requests to fetch, make,
copy or delete a model are answered by what to type instead.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.request.sampling_params import OLLAMA
from paceline.server.admin.health import Version
from paceline.server.hosting.answering import known
from paceline.server.hosting.models import Models
from paceline.server.hosting.serving import LATEST, Serving, used_memory
from paceline.server.http.body import WholeAnswer, read_body
from paceline.server.http.errors import ApiError
from paceline.server.http.openapi import errors, posts
from paceline.server.ollama.endpoints import timestamp
from paceline.server.ollama.request import ShowRequest

API_VERSION = "0.12.6"
"""Of the Ollama whose API this is; clients ask whether it is new enough for what they send."""
FOR_EVER = "2300-01-01T00:00:00Z"
"""When a model that stays loaded leaves."""
_LONGEST_SECONDS = 1e9
"""Beyond that it stays."""
_NAMES = {"repetition_penalty": "repeat_penalty"}

_CHOSEN_AT_START = {
    "/api/pull": "`paceline pull NAME` fetches one and `paceline serve NAME` serves it",
    "/api/push": "nothing is published from here",
    "/api/create": "`paceline serve PATH` serves a folder or a GGUF file",
    "/api/blobs/{digest}": "`paceline serve PATH` serves a folder or a GGUF file",
    "/api/copy": "`paceline serve MODEL --served-model-name NAME` serves one by another name",
    "/api/delete": "a request with keep_alive: 0 unloads one, `paceline rm NAME` deletes its files",
}
"""What to type or send where Ollama would change which models there are."""

router = APIRouter()


async def refuse_change(request: Request) -> Response:
    advice = _CHOSEN_AT_START[request.scope["route"].path]
    message = f"the models of a server are chosen when it starts: {advice}"
    raise ApiError(400, message, code="models_are_fixed")


for _path in _CHOSEN_AT_START:
    _method = "DELETE" if _path == "/api/delete" else "POST"
    router.add_api_route(_path, refuse_change, methods=[_method], include_in_schema=False)


@router.get("/api/version", responses=errors())
async def version() -> Version:
    return Version(version=API_VERSION)


@router.get("/api/tags", responses=errors(), response_model=dict[str, Any])
async def tags(request: Request) -> dict[str, Any]:
    models = Models.of(request)
    named = [(models.find(name), name) for name in models.names]
    return {
        "models": [
            {**_card(serving, name), "modified_at": timestamp(serving.created)}
            for serving, name in named
        ]
    }


@router.get("/api/ps", responses=errors(), response_model=dict[str, Any])
async def loaded(request: Request) -> dict[str, Any]:
    return {
        "models": [
            {
                **_card(serving, serving.name),
                "size": used_memory(serving.client),
                "reserved": serving.size,
                "size_vram": 0,
                "expires_at": _expiry(serving),
                "context_length": serving.client.info.max_model_len,
            }
            for serving in Models.of(request).loaded
        ]
    }


def _expiry(serving: Serving) -> str:
    """When a model is unloaded if it is not used."""
    seconds = serving.resident.seconds_left
    return FOR_EVER if seconds > _LONGEST_SECONDS else timestamp(time.time() + seconds)


@posts(router, ShowRequest, "/api/show", answer=dict[str, Any])
async def show(request: Request) -> Response:
    body = await read_body(request, ShowRequest)
    serving = await known(request, body.model or body.name)
    info, tokenizer = serving.client.info, serving.client.tokenizer
    family = info.architecture
    sampling = info.sampling.values if info.sampling.is_stated else OLLAMA
    defaults = [f"{_NAMES.get(name, name)} {value}" for name, value in sampling.items()]
    document = {
        "modelfile": "",
        "parameters": "\n".join(defaults),
        "template": (tokenizer and tokenizer.chat_template) or "",
        **_opening(() if tokenizer is None else tokenizer.chat_opening),
        "details": _details(serving),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": info.num_weights,
            f"{family}.context_length": info.max_model_len,
            f"{family}.embedding_length": info.hidden_size,
            f"{family}.block_count": info.num_layers,
            f"{family}.vocab_size": info.vocab_size,
        },
        "capabilities": _capabilities(serving),
        "modified_at": timestamp(serving.created),
    }
    return WholeAnswer.of(request, document)


def _opening(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What stands before each chat, as Ollama tells it: nothing that is empty."""
    system = "\n\n".join(each["content"] for each in messages if each["role"] == "system")
    others = [dict(each) for each in messages if each["role"] != "system"]
    return {**({"system": system} if system else {}), **({"messages": others} if others else {})}


def _card(serving: Serving, name: str) -> dict[str, Any]:
    """A name in a list. The digest is of the name and the server's version, not of weights."""
    tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
    digest = hashlib.sha256(f"{tagged} {__version__}".encode()).hexdigest()
    return {
        "name": tagged,
        "model": tagged,
        "size": serving.num_bytes,
        "digest": digest,
        "details": _details(serving),
    }


def _details(serving: Serving) -> dict[str, Any]:
    """What a model tells of itself; nothing before it was first loaded."""
    info = serving.client.info if serving.is_known else None
    return {
        "parent_model": "",
        "format": "",
        "family": info.architecture if info else "",
        "families": [info.architecture] if info else [],
        "parameter_size": _rounded(info.num_weights) if info else "",
        "quantization_level": info.dtype if info else "",
    }


def _rounded(count: int) -> str:
    """A number of parameters as Ollama writes it: 134.52M, 1.2B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)


def _capabilities(serving: Serving) -> list[str]:
    capabilities = ["completion", *(["embedding"] if serving.client.info.pooling else [])]
    if serving.client.tokenizer is None:
        return capabilities
    formats = serving.formats
    if formats.is_harmony or formats.tools is not None:
        capabilities.append("tools")
    if formats.is_harmony or formats.thoughts is not None:
        capabilities.append("thinking")
    return capabilities
