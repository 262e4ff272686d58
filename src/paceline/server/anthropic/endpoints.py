"""``POST /v1/messages`` and ``/v1/messages/count_tokens``; errors have Anthropic's shape."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.anthropic.answer import Content, event, usage_of
from paceline.server.anthropic.conversation import chat_of
from paceline.server.anthropic.fields import Conversation, Message, MessagesRequest, TokenCount
from paceline.server.api.chat import Chat, num_prompt_tokens
from paceline.server.api.common import received, respond
from paceline.server.errors import to_api_error
from paceline.server.openapi import BODY_ERRORS, GENERATION_ERRORS, answers, errors, takes
from paceline.server.serving import Serving
from paceline.server.sse import Deadline, encode_json
from paceline.server.tracing import current_request_id

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: BaseException) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and body of an error."""
    told = to_api_error(error)
    kind = _TYPES.get(told.status, "invalid_request_error" if told.status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": told.message}}
    return told.status, told.headers, {**body, "request_id": current_request_id() or None}


def error_event(error: BaseException) -> bytes:
    """The end of a stream that failed."""
    return event(error_body(error)[2])


class MessagesRoute(APIRoute):
    """Of an endpoint that takes the request alone; what it raises becomes such an error."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint

        async def handle(request: Request) -> Response:
            try:
                return await endpoint(request)
            except Exception as error:
                status, headers, body = error_body(error)
                return Response(encode_json(body), status, headers, "application/json")

        return handle


router = APIRouter(route_class=MessagesRoute)


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
        content, usage = self._content, usage_of(self._usage.document())
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
        usage = usage_of(self._usage.document())
        last = {"type": "message_delta", "delta": self._content.end, "usage": usage}
        yield event(last) + event({"type": "message_stop"})

    def _begin(self) -> bytes:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._message, **empty, "usage": usage_of(self._usage.document())}
        return event({"type": "message_start", "message": message}) + event({"type": "ping"})
