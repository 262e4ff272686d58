"""``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.anthropic.answer import Content, event, usage_of
from paceline.server.anthropic.conversation import chat_of
from paceline.server.anthropic.fields import Conversation, Message, MessagesRequest, TokenCount
from paceline.server.hosting.serving import Serving
from paceline.server.http.errors import anthropic_document, to_api_error
from paceline.server.http.openapi import BODY_ERRORS, GENERATION_ERRORS, answers, errors, takes
from paceline.server.http.sse import Deadline, encode_json
from paceline.server.openai.chat import Chat, num_prompt_tokens
from paceline.server.openai.common import PlainRoute, received, respond


def error_event(error: BaseException) -> bytes:
    """The end of a stream that failed."""
    told = to_api_error(error)
    return event(anthropic_document(told.status, told.message))


router = APIRouter(route_class=PlainRoute)


@router.post(
    "/v1/messages",
    responses=answers(Message) | errors(*GENERATION_ERRORS),
    openapi_extra=takes(MessagesRequest),
)
async def messages(request: Request) -> Response:
    serving, body, deadline = await received(request, MessagesRequest)
    return await respond(request, Messages(serving, body, deadline), error_event)


@router.post(
    "/v1/messages/count_tokens",
    response_model=TokenCount,
    responses=errors(*BODY_ERRORS),
    openapi_extra=takes(Conversation),
)
async def count_tokens(request: Request) -> Response:
    serving, body, _ = await received(request, Conversation)
    count = await num_prompt_tokens(serving, chat_of(body))
    return Response(encode_json({"input_tokens": count}), media_type="application/json")


class Messages(Chat):
    """The chat that a body asks for, told as a message."""

    def __init__(self, serving: Serving, body: MessagesRequest, deadline: Deadline) -> None:
        super().__init__(serving, chat_of(body), deadline)
        self._content = Content(body.stop_sequences or ())
        self._message = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": body.model or serving.name,
        }

    async def document(self, request: Request) -> dict[str, Any]:
        async with self._answers(request) as found:
            async for piece in found:
                for part in await self._parts(found, piece):
                    for _ in self._content.take(part):
                        pass
        content, usage = self._content, usage_of(self._usage)
        return {**self._message, "content": content.blocks, **content.end, "usage": usage}

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        has_begun = False
        async with self._answers(request) as found:
            yield b""
            async for piece in found:
                parts = await self._parts(found, piece)
                begin = b"" if has_begun else self._begin()
                has_begun = True
                told = [event(each) for part in parts for each in self._content.take(part)]
                yield begin + b"".join(told)
        usage = usage_of(self._usage)
        last = {"type": "message_delta", "delta": self._content.end, "usage": usage}
        yield event(last) + event({"type": "message_stop"})

    def _begin(self) -> bytes:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._message, **empty, "usage": usage_of(self._usage)}
        return event({"type": "message_start", "message": message}) + event({"type": "ping"})
