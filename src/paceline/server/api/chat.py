"""``POST /v1/chat/completions``: the next message of a conversation. Owns the order of its parts.

What a chat asks for and how its text is read is :mod:`paceline.server.chat`'s.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.errors import RequestError
from paceline.server.body import read_body
from paceline.server.chat.choice import ChatChoice, ChatLogprobs, joined
from paceline.server.chat.demands import Demands, blamed
from paceline.server.chat.prompt import prompt_text, thoughts_of
from paceline.server.chat.tool_formats import tool_format
from paceline.server.encoding import encode
from paceline.server.errors import ApiError, error_event
from paceline.server.messages import Piece
from paceline.server.openapi import GENERATION_ERRORS, answers, errors, takes
from paceline.server.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from paceline.server.sampling import answer_limit, sampling_params
from paceline.server.serving import Answers, Prompt, Serving
from paceline.server.sse import DONE, EventStream, encode_json, event, while_connected
from paceline.server.tokens import OriginTokens, prompt_logprobs
from paceline.server.usage import Usage

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    responses=answers(ChatCompletionResponse) | errors(*GENERATION_ERRORS),
    openapi_extra=takes(ChatCompletionRequest),
)
async def chat_completions(request: Request) -> Response:
    serving = Serving.of(request)
    body = await read_body(request, ChatCompletionRequest)
    chat = await Chat.prepared(serving, body)
    timeout = serving.config.timeout
    if body.stream:
        return await EventStream.started(chat.events(request), error_event, timeout)
    document = await while_connected(request.receive, chat.document(request), timeout)
    return Response(encode_json(document), media_type="application/json")


class Chat:
    """One request while it is served."""

    def __init__(
        self, serving: Serving, body: ChatCompletionRequest, prompt: Prompt, demands: Demands
    ) -> None:
        self._serving = serving
        self._body = body
        self._prompt = prompt
        self._demands = demands
        info = serving.client.info
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": serving.model_name(body.model),
            # What decides which tokens follow from a seed.
            "system_fingerprint": f"paceline-{__version__}-{info.dtype}-{info.backend}",
        }
        self._choices: dict[int, ChatChoice] = {}
        self._usage = Usage(len(prompt.token_ids), body.include_metrics)

    @classmethod
    async def prepared(cls, serving: Serving, body: ChatCompletionRequest) -> Chat:
        """Render, encode and check.

        Raises:
            RequestError, ApiError: the request cannot be served.
        """
        serving.model_name(body.model)
        tokenizer, config = serving.tokenizer, serving.config
        if not tokenizer.has_chat_template:
            raise ApiError(
                400,
                "the model has no chat template, so it does not know conversations; send a text "
                "to /v1/completions, or put a chat_template.jinja into the model's folder",
                code="no_chat_template",
            )
        text = await asyncio.to_thread(prompt_text, tokenizer, body)
        thoughts = thoughts_of(tokenizer, body, text, config.reasoning_parser)
        demands = Demands.of(body, tool_format(config.tool_call_parser, tokenizer), thoughts)
        token_ids = await encode(serving, text, add_special_tokens=False)
        limit = answer_limit(len(token_ids), body.limit, serving.client.info)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = sampling_params(body, serving.client.info, max_tokens=limit, logprobs=logprobs)
        params = replace(params, structured_outputs=demands.grammar)
        return cls(serving, body, Prompt(token_ids, params), demands)

    # --- the answer ----------------------------------------------------------------------------

    async def document(self, request: Request) -> dict[str, Any]:
        """The answer in one body."""
        parts: dict[int, list[dict[str, Any]]] = {}
        async with self._answering(request) as found:
            async for _, piece in found:
                parts.setdefault(piece.index, []).extend(self._take(piece))
            prompt = self._prompt_logprobs(found)
        choices = [joined(parts[index]) for index in sorted(parts)]
        return {**self._head, "choices": choices, "usage": self._usage.document(), **prompt}

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The answer as events; the first is empty and says that it was accepted."""
        wants_usage = self._body.wants_usage_chunk
        usage = {"usage": None} if wants_usage else {}
        async with self._answering(request) as found:
            yield b""
            async for _, piece in found:
                first = [] if piece.index in self._choices else [self._choice(piece.index).begin()]
                parts = [*first, *self._take(piece)]
                yield b"".join([event({**self._head, "choices": [p], **usage}) for p in parts])
        if wants_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.document()})
        yield DONE

    @asynccontextmanager
    async def _answering(self, request: Request) -> AsyncIterator[Answers]:
        async with AsyncExitStack() as stack:
            answering = self._serving.answering(request, [self._prompt], self._body.cache_salt)
            try:
                found = await stack.enter_async_context(answering)
            except RequestError as error:
                raise blamed(error, self._demands.param) from error
            yield found

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        self._usage.take(piece)
        return self._choice(piece.index).take(piece)

    def _choice(self, index: int) -> ChatChoice:
        choice = self._choices.get(index)
        if choice is None:
            body, serving = self._body, self._serving
            logprobs = None
            if body.logprobs:
                logprobs = ChatLogprobs(body.top_logprobs or 0, serving.texts)
            origins = None
            if body.return_origins:
                origins = OriginTokens(serving.tokenizer, self._prompt.token_ids)
            choice = ChatChoice(index, self._demands.parser(), logprobs, origins)
            self._choices[index] = choice
        return choice

    def _prompt_logprobs(self, found: Answers) -> dict[str, Any]:
        count = self._body.prompt_logprobs
        if count is None:
            return {}
        entries = found.generations[0].prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(entries, self._serving.texts, count)}
