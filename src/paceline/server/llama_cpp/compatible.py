"""Endpoints by which clients of llama.cpp and vLLM look at a server, under their names.

``GET /props`` and ``POST /apply-template`` are llama.cpp's, ``/ping`` and ``GET /tokenizer_info``
vLLM's. Owns what they say; nothing here generates.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.request.sampling_defaults import NEUTRAL
from paceline.server.api.health import Health, health
from paceline.server.chat.prompt import prompt_text, with_defaults
from paceline.server.http.openapi import BODY_ERRORS, errors, takes
from paceline.server.http.sse import encode_json
from paceline.server.openai.common import PlainRoute, known, received
from paceline.server.protocol.chat import ChatCompletionRequest
from paceline.server.protocol.common import ErrorBody
from paceline.text.tokenizer import Tokenizer

router = APIRouter(route_class=PlainRoute)
reports = APIRouter()


@reports.get("/ping", responses={503: {"model": ErrorBody}})
@reports.post("/ping", responses={503: {"model": ErrorBody}})
async def ping(request: Request) -> Health:
    return await health(request)


@reports.get("/props", responses=errors(404), response_model=dict[str, Any])
async def props(request: Request, model: str | None = None) -> dict[str, Any]:
    serving = await known(request, model)
    info, tokenizer = serving.client.info, serving.client.tokenizer
    return {
        "default_generation_settings": {
            "n_ctx": info.max_model_len,
            "params": {**NEUTRAL, **info.sampling.values},
        },
        "total_slots": info.max_num_seqs,
        "model_alias": serving.name,
        "model_path": info.model,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"paceline {__version__}",
        **_own_texts(tokenizer),
    }


@reports.get("/tokenizer_info", responses=errors(400, 404), response_model=dict[str, Any])
async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
    serving = await known(request, model)
    tokenizer = serving.tokenizer
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": serving.client.info.max_model_len,
        **_own_texts(tokenizer),
    }


def _own_texts(tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        return {"chat_template": None, "bos_token": None, "eos_token": None}
    return {
        "chat_template": tokenizer.chat_template,
        "bos_token": _spelled(tokenizer, tokenizer.bos_token_id),
        "eos_token": _spelled(tokenizer, next(iter(tokenizer.eos_token_ids), None)),
    }


def _spelled(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.id_to_token(token_id)


@router.post(
    "/apply-template",
    response_model=dict[str, str],
    responses=errors(*BODY_ERRORS),
    openapi_extra=takes(ChatCompletionRequest),
)
async def apply_template(request: Request) -> Response:
    """The text that a chat's messages become; nothing is generated."""
    serving, body, _ = await received(request, ChatCompletionRequest)
    body = with_defaults(body, serving.config.default_chat_template_kwargs)
    async with serving.using():
        text = await asyncio.to_thread(prompt_text, serving.tokenizer, body)
    return Response(encode_json({"prompt": text}), media_type="application/json")
