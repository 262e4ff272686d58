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

from paceline.errors import RequestError
from paceline.sampling_params import MAX_STOP_STRINGS
from paceline.server.api.common import PlainRoute, Usage, encode, respond
from paceline.server.body import read_body
from paceline.server.chat.choice import ChatChoice, ChatLogprobs, joined
from paceline.server.chat.demands import Demands, blamed
from paceline.server.chat.prompt import prompt_text, thoughts_of
from paceline.server.chat.tool_formats import tool_format
from paceline.server.errors import ApiError
from paceline.server.messages import Piece
from paceline.server.openapi import GENERATION_ERRORS, answers, errors, takes
from paceline.server.protocol.chat import ChatCompletionRequest
from paceline.server.protocol.chat_answer import UNENFORCED, ChatCompletionResponse
from paceline.server.sampling import answer_limit, sampling_params
from paceline.server.serving import Answers, Prompt, Serving
from paceline.server.sse import ChoiceEvents, Deadline
from paceline.server.tokens import OriginTokens, prompt_logprobs

router = APIRouter(route_class=PlainRoute)


@router.post(
    "/v1/chat/completions",
    responses=answers(ChatCompletionResponse) | errors(*GENERATION_ERRORS),
    openapi_extra=takes(ChatCompletionRequest),
)
async def chat_completions(request: Request) -> Response:
    serving = Serving.of(request)
    deadline = Deadline.after(serving.config.timeout)
    body = await read_body(request, ChatCompletionRequest)
    chat = Chat(serving, body, deadline)
    return await respond(request, chat, body.stream, deadline)


class Chat:
    """One request while it is served.

    Args:
        deadline: it began when the request arrived.

    Raises:
        ApiError: what is asked for does not exist.
    """

    # Once the conversation is rendered.
    _prompt: Prompt
    _demands: Demands
    _usage: Usage

    def __init__(self, serving: Serving, body: ChatCompletionRequest, deadline: Deadline) -> None:
        self.headers: dict[str, str] = {}
        self._serving = serving
        self._body = body
        self._deadline = deadline
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": serving.model_name(body.model),
            "system_fingerprint": serving.fingerprint,
        }
        self._choices: dict[int, ChatChoice] = {}
        if not serving.tokenizer.has_chat_template:
            raise ApiError(
                400,
                "the model has no chat template, so it does not know conversations; send a text "
                "to /v1/completions, or start the server with --chat-template",
                code="no_chat_template",
            )

    async def _prepare(self) -> None:
        """Render, encode and check.

        Raises:
            RequestError, ApiError: the request cannot be served.
        """
        serving, body = self._serving, self._body
        tokenizer, config = serving.tokenizer, serving.config
        text = await asyncio.to_thread(prompt_text, tokenizer, body)
        thoughts = thoughts_of(tokenizer, body, text, config.reasoning_parser)
        demands = Demands.of(body, tool_format(config.tool_call_parser, tokenizer), thoughts)
        if demands.unenforced:
            self.headers[UNENFORCED] = ", ".join(demands.unenforced)
        token_ids = await encode(serving, text, add_special_tokens=False)
        info = serving.client.info
        limit = answer_limit(len(token_ids), body.limit, info)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = sampling_params(
            body, info, max_tokens=limit, structured=demands.grammar, logprobs=logprobs
        )
        if not body.ignore_eos:
            stops = (*params.stop, *tokenizer.chat_stops)
            params = replace(params, stop=stops[:MAX_STOP_STRINGS])
        self._prompt, self._demands = Prompt(token_ids, params), demands
        self._usage = Usage(len(token_ids), body)

    # --- the answer ----------------------------------------------------------------------------

    async def document(self, request: Request) -> dict[str, Any]:
        """The answer in one body."""
        parts: dict[int, list[dict[str, Any]]] = {}
        async with self._answering(request) as found:
            async for _, piece in found:
                parts.setdefault(piece.index, []).extend(self._take(piece))
            prompt = await self._prompt_logprobs(found)
        choices = [joined(parts[index]) for index in sorted(parts)]
        return {**self._head, "choices": choices, "usage": self._usage.document(), **prompt}

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The answer as events; the first is empty and says that it was accepted."""
        chunks = ChoiceEvents(self._head, self._body.wants_usage)
        async with self._answering(request) as found:
            yield b""
            async for _, piece in found:
                first = [] if piece.index in self._choices else [self._choice(piece.index).begin()]
                choices = [*first, *self._take(piece)]
                yield chunks.of(choices, self._usage.so_far())
        yield chunks.end(self._usage.document())

    @asynccontextmanager
    async def _answering(self, request: Request) -> AsyncIterator[Answers]:
        serving, body = self._serving, self._body
        async with AsyncExitStack() as stack:
            stack.enter_context(serving.admitted(body.n or 1))
            await self._prepare()
            answering = serving.answering(request, [self._prompt], self._deadline, body.cache_salt)
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

    async def _prompt_logprobs(self, found: Answers) -> dict[str, Any]:
        count = self._body.prompt_logprobs
        if count is None:
            return {}
        entries = found.generations[0].prompt_logprobs
        # Twenty for each token of a long prompt take their time.
        told = await asyncio.to_thread(prompt_logprobs, entries, self._serving.texts, count)
        return {"prompt_logprobs": told}
