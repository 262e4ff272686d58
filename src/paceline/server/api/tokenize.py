"""``POST /tokenize`` and ``POST /detokenize``: what a text is to the model, and back."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import ContextLengthError, RequestError
from paceline.server.api.common import PlainRoute, encode, received
from paceline.server.chat.prompt import prompt_text
from paceline.server.openapi import BODY_ERRORS, errors, takes
from paceline.server.protocol.chat import ChatCompletionRequest
from paceline.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from paceline.server.serving import Serving
from paceline.server.sse import encode_json

router = APIRouter(route_class=PlainRoute)


@router.post(
    "/tokenize",
    response_model=TokenizeResponse,
    responses=errors(*BODY_ERRORS),
    openapi_extra=takes(TokenizeRequest),
)
async def tokenize(request: Request) -> Response:
    serving, body, _ = await received(request, TokenizeRequest)
    async with serving.using():
        document = await _tokens(serving, body)
    return Response(encode_json(document), media_type="application/json")


async def _tokens(serving: Serving, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = serving.tokenizer
    if body.prompt is None:
        chat = ChatCompletionRequest.model_validate(body.chat)
        text = await asyncio.to_thread(prompt_text, tokenizer, chat)
        token_ids = await encode(serving, text, bool(body.add_special_tokens))
    else:
        token_ids = await encode(serving, body.prompt, body.add_special_tokens is not False)
    token_strs = None
    if body.return_token_strs:
        token_strs = await asyncio.to_thread(lambda: [*map(tokenizer.id_to_token, token_ids)])
    return {
        "count": len(token_ids),
        "max_model_len": serving.client.info.max_model_len,
        "tokens": token_ids,
        "token_strs": token_strs,
    }


@router.post(
    "/detokenize",
    response_model=DetokenizeResponse,
    responses=errors(*BODY_ERRORS),
    openapi_extra=takes(DetokenizeRequest),
)
async def detokenize(request: Request) -> Response:
    serving, body, _ = await received(request, DetokenizeRequest)
    async with serving.using():
        text = await _text(serving, body.tokens)
    return Response(encode_json({"prompt": text}), media_type="application/json")


async def _text(serving: Serving, token_ids: list[int]) -> str:
    info = serving.client.info
    if len(token_ids) > info.max_model_len:
        raise ContextLengthError(
            f"tokens has {len(token_ids)} ids; this model's maximum context length is "
            f"{info.max_model_len} tokens"
        )
    largest, size = max(token_ids, default=0), info.vocab_size
    if largest >= size:
        raise RequestError(f"tokens holds {largest}; the vocabulary is 0 to {size - 1}")
    return await asyncio.to_thread(serving.tokenizer.decode, token_ids, skip_special_tokens=False)
