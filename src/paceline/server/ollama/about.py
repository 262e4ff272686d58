"""What Ollama's clients ask of a server besides answers: its models, and its version.

``GET /api/tags``, ``/api/ps`` and ``/api/version``, ``POST /api/show``. Owns names with tags: a
model is served under its own, and each of them means the same with ``:latest``.
"""

from __future__ import annotations

import hashlib
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from paceline.server.body import read_body
from paceline.server.chat.tool_formats import tool_format
from paceline.server.errors import ApiError
from paceline.server.ollama.answer import timestamp
from paceline.server.ollama.fields import Options, ShowRequest
from paceline.server.openapi import BODY_ERRORS, errors, takes
from paceline.server.protocol.answers import Version
from paceline.server.serving import Serving

LATEST = ":latest"
API_VERSION = "0.12.6"
"""Of the Ollama whose API this is; clients ask whether it is new enough for what they send."""
FOR_EVER = "2300-01-01T00:00:00Z"
"""When a model that stays loaded leaves."""

reports = APIRouter()


def served_name(serving: Serving, asked: str) -> str:
    """The name under which the model is served; raises as :meth:`Serving.model_name`."""
    is_known = asked in serving.names
    return serving.model_name(asked if is_known else asked.removesuffix(LATEST))


def checked_name(serving: Serving, asked: str, options: Options | None) -> str:
    """The name under which the model that a body asks for is served.

    Raises:
        ApiError: there is no such model, or its context is smaller than the options ask for.
    """
    model, context = served_name(serving, asked), serving.client.info.max_model_len
    wanted = None if options is None else options.num_ctx
    if wanted is not None and wanted > context:
        raise ApiError(
            400,
            f"options.num_ctx is {wanted}; the model is served with a context of {context} tokens",
            param="options.num_ctx",
        )
    return model


@reports.get("/api/version", responses=errors())
async def version() -> Version:
    return Version(version=API_VERSION)


@reports.get("/api/tags", responses=errors(), response_model=dict[str, Any])
async def tags(request: Request) -> dict[str, Any]:
    serving = Serving.of(request)
    modified = {"modified_at": timestamp(serving.created)}
    return {"models": [{**_card(serving, name), **modified} for name in serving.names]}


@reports.get("/api/ps", responses=errors(), response_model=dict[str, Any])
async def loaded(request: Request) -> dict[str, Any]:
    serving = Serving.of(request)
    rest = {
        "expires_at": FOR_EVER,
        "size_vram": 0,
        "context_length": serving.client.info.max_model_len,
    }
    return {"models": [{**_card(serving, name), **rest} for name in serving.names]}


@reports.post(
    "/api/show",
    responses=errors(*BODY_ERRORS),
    openapi_extra=takes(ShowRequest),
    response_model=dict[str, Any],
)
async def show(request: Request) -> dict[str, Any]:
    serving = Serving.of(request)
    body = await read_body(request, ShowRequest)
    served_name(serving, body.model or body.name or "")
    info, tokenizer = serving.client.info, serving.client.tokenizer
    family = info.architecture
    defaults = [f"{name} {value}" for name, value in info.generation_defaults.items()]
    return {
        "modelfile": "",
        "parameters": "\n".join(defaults),
        "template": (tokenizer and tokenizer.chat_template) or "",
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


def _card(serving: Serving, name: str) -> dict[str, Any]:
    """A name in a list. The digest is of what the server says of the model, not of weights."""
    tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
    digest = hashlib.sha256(f"{tagged} {serving.fingerprint}".encode()).hexdigest()
    size = serving.client.info.num_bytes
    details = _details(serving)
    return {"name": tagged, "model": tagged, "size": size, "digest": digest, "details": details}


def _details(serving: Serving) -> dict[str, Any]:
    info = serving.client.info
    return {
        "parent_model": "",
        "format": "",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": _rounded(info.num_weights),
        "quantization_level": info.dtype,
    }


def _rounded(count: int) -> str:
    """A number of parameters as Ollama writes it: 134.52M, 1.2B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)


def _capabilities(serving: Serving) -> list[str]:
    config, tokenizer = serving.config, serving.client.tokenizer
    found = ["completion"]
    if tokenizer is not None and tool_format(config.tool_call_parser, tokenizer) is not None:
        found.append("tools")
    thinks = tokenizer is not None and tokenizer.template_mentions("think>")
    if thinks and config.reasoning_parser != "none":
        found.append("thinking")
    return found
