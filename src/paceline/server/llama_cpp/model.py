"""What clients of llama.cpp and vLLM ask of a model and its vocabulary; nothing here generates.

``GET /props`` and ``POST /apply-template`` are llama.cpp's, ``/ping`` and ``GET /tokenizer_info``
vLLM's, ``POST /tokenize`` and ``/detokenize`` of both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.core.errors import ContextLengthError, RequestError
from paceline.request.sampling_params import NEUTRAL
from paceline.server.admin.health import Health, health
from paceline.server.chat.prompt import prompt_text, with_defaults
from paceline.server.engine_process.tokens import TokenTexts
from paceline.server.hosting.answering import check_length, encode, known, received
from paceline.server.hosting.serving import Serving
from paceline.server.http.body import WholeAnswer
from paceline.server.http.openapi import errors, posts
from paceline.server.llama_cpp.request import (
    ContentTokens,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from paceline.server.protocol.chat import ChatCompletionRequest
from paceline.server.protocol.generation import ErrorBody
from paceline.text.tokenizer import Tokenizer

router = APIRouter()


@router.get("/ping", responses={503: {"model": ErrorBody}})
@router.post("/ping", responses={503: {"model": ErrorBody}})
async def ping(request: Request) -> Health:
    return await health(request)


@router.get("/props", responses=errors(404), response_model=dict[str, Any])
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


@router.get("/tokenizer_info", responses=errors(400, 404), response_model=dict[str, Any])
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


@posts(router, ChatCompletionRequest, "/apply-template", answer=dict[str, str])
async def apply_template(request: Request) -> Response:
    """The text that a chat's messages become; nothing is generated."""
    serving, body, _ = await received(request, ChatCompletionRequest)
    body = with_defaults(body, serving.config.default_chat_template_kwargs)
    async with serving.using():
        text = await asyncio.to_thread(prompt_text, serving.tokenizer, body, serving.formats)
    return WholeAnswer.of(request, {"prompt": text})


@posts(router, TokenizeRequest, "/tokenize", answer=TokenizeResponse | ContentTokens)
async def tokenize(request: Request) -> Response:
    serving, body, _ = await received(request, TokenizeRequest)
    async with serving.using():
        asked = _tokens if body.content is None else _content_tokens
        document = await asked(serving, body)
    return WholeAnswer.of(request, document)


async def _tokens(serving: Serving, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = serving.tokenizer
    if body.prompt is None:
        chat = ChatCompletionRequest.model_validate(body.chat)
        chat = with_defaults(chat, serving.config.default_chat_template_kwargs)
        text = await asyncio.to_thread(prompt_text, tokenizer, chat, serving.formats)
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


async def _content_tokens(serving: Serving, body: TokenizeRequest) -> dict[str, Any]:
    """As llama.cpp does (b11549), but that ids which the vocabulary lacks are refused."""
    content = [body.content] if isinstance(body.content, str) else body.content or []
    check_length(serving, sum(len(each) for each in content if isinstance(each, str)))
    _check_ids(serving, [each for each in content if isinstance(each, int)], "content")
    tokenizer = serving.tokenizer
    parses = body.parse_special is not False
    token_ids = await asyncio.to_thread(
        mixed_ids, tokenizer, content, bool(body.add_special), parses
    )
    if not body.with_pieces:
        return {"tokens": token_ids}
    return {"tokens": await asyncio.to_thread(_pieces, serving.texts, token_ids)}


def mixed_ids(
    tokenizer: Tokenizer, content: Sequence[str | int], adds: bool, parses_special: bool = True
) -> list[int]:
    """The ids of texts and ids.

    Args:
        adds: what encoding adds to a text is added where the first one is a text.
        parses_special: special tokens that a text spells out are those, and no mere text.
    """
    token_ids = list[int]()
    for each in content:
        if isinstance(each, int):
            token_ids.append(each)
        elif parses_special:
            token_ids += tokenizer.encode(each, adds)
        else:
            token_ids += tokenizer.encode_literal(each, add_special_tokens=adds)
        adds = False
    return token_ids


def _pieces(texts: TokenTexts, token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Each token with its text, or with its bytes where they are no UTF-8."""
    return [{"id": each, "piece": _piece(texts.raw(each))} for each in token_ids]


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


@posts(router, DetokenizeRequest, "/detokenize", answer=DetokenizeResponse)
async def detokenize(request: Request) -> Response:
    serving, body, _ = await received(request, DetokenizeRequest)
    async with serving.using():
        _check_ids(serving, body.tokens)
        document = await asyncio.to_thread(_texts, serving, body.tokens)
    return WholeAnswer.of(request, document)


def _check_ids(serving: Serving, token_ids: Sequence[int], param: str = "tokens") -> None:
    info = serving.client.info
    if len(token_ids) > info.max_model_len:
        raise ContextLengthError(
            f"{param} has {len(token_ids)} ids; this model's maximum context length is "
            f"{info.max_model_len} tokens"
        )
    largest, size = max(token_ids, default=0), info.vocab_size
    if largest >= size:
        raise RequestError.of(param, f"holds {largest}; the vocabulary is 0 to {size - 1}")


def _texts(serving: Serving, token_ids: list[int]) -> dict[str, str]:
    tokenizer, texts = serving.tokenizer, serving.texts
    known = [each for each in token_ids if tokenizer.id_to_token(each) is not None]
    return {
        "prompt": tokenizer.decode(token_ids, skip_special_tokens=False),
        "content": text_of(known, texts),
    }


def text_of(token_ids: Sequence[int], texts: TokenTexts) -> str:
    """The texts of tokens in a row, special ones included."""
    return b"".join(map(texts.raw, token_ids)).decode(errors="replace")
