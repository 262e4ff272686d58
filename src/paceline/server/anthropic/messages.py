"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: a chat's answer as a message.

Thoughts, words and calls are blocks, in the order in which the chat tells them. The signature of
thoughts is their digest: it comes back with them and is not looked at.
"""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.anthropic.request import (
    AnthropicConversation,
    Message,
    MessagesRequest,
    TokenCount,
    chat_of,
)
from paceline.server.chat.tool_calls.values import arguments_of
from paceline.server.hosting.answering import Usage, received, respond
from paceline.server.hosting.serving import Serving
from paceline.server.http.body import WholeAnswer
from paceline.server.http.errors import anthropic_document, to_api_error
from paceline.server.http.openapi import posts
from paceline.server.http.sse import EVENTS, Deadline, named_event
from paceline.server.openai.chat import ServedChat, num_prompt_tokens


def error_event(error: BaseException) -> bytes:
    """The end of a stream that failed."""
    api_error = to_api_error(error)
    return named_event(anthropic_document(api_error.status, api_error.message))


router = APIRouter()


@posts(router, MessagesRequest, "/v1/messages", answer=Message, events=EVENTS)
async def messages(request: Request) -> Response:
    serving, body, deadline = await received(request, MessagesRequest)
    return await respond(request, Messages(serving, body, deadline), error_event)


@posts(router, AnthropicConversation, "/v1/messages/count_tokens", answer=TokenCount)
async def count_tokens(request: Request) -> Response:
    serving, body, _ = await received(request, AnthropicConversation)
    count = await num_prompt_tokens(serving, chat_of(body))
    return WholeAnswer.of(request, {"input_tokens": count})


class Messages(ServedChat):
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
        async with self._answers(request) as answers:
            async for piece in answers:
                for part in await self._parts(answers, piece):
                    for _ in self._content.take(part):
                        pass
        content, usage = self._content, usage_of(self._usage)
        return {**self._message, "content": content.blocks, **content.end, "usage": usage}

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        has_begun = False
        async with self._answers(request) as answers:
            yield b""
            async for piece in answers:
                parts = await self._parts(answers, piece)
                begin = b"" if has_begun else self._begin()
                has_begun = True
                events = [named_event(each) for part in parts for each in self._content.take(part)]
                yield begin + b"".join(events)
        usage = usage_of(self._usage)
        last = {"type": "message_delta", "delta": self._content.end, "usage": usage}
        yield named_event(last) + named_event({"type": "message_stop"})

    def _begin(self) -> bytes:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._message, **empty, "usage": usage_of(self._usage)}
        return named_event({"type": "message_start", "message": message}) + named_event(
            {"type": "ping"}
        )


Event = dict[str, Any]
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def usage_of(counted: Usage) -> dict[str, Any]:
    """The usage in Anthropic's words."""
    usage = counted.document()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": counted.num_thinking_tokens},
    }


def stop_of(choice: dict[str, Any], stop_sequences: Sequence[str]) -> dict[str, Any]:
    """Why a choice ended; its template's own stop strings are the end of a turn."""
    stop_reason = choice["stop_reason"]
    if choice["finish_reason"] == "stop" and stop_reason in stop_sequences:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _REASONS[choice["finish_reason"]], "stop_sequence": None}


class Content:
    """The blocks of one message while they grow, and the events that tell them.

    Both are made by one reader of the chat's parts, so that a stream adds up to the message.

    Attributes:
        blocks: all of them; the last one may go on.
        end: why the chat ended, once it has.
    """

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.end: dict[str, Any] = {}
        self._stops = stop_sequences
        self._is_open = False
        self._arguments = ""  # of the call that is open

    def take(self, part: dict[str, Any]) -> Iterator[Event]:
        """What a part of the chat's choice adds."""
        delta = part["delta"]
        thoughts, words = delta.get("reasoning_content"), delta.get("content")
        if thoughts:
            yield from self._open("thinking", thinking="", signature="")
            yield self._more("thinking", "thinking_delta", thoughts)
        if words:
            yield from self._open("text", text="")
            yield self._more("text", "text_delta", words)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                named = {"id": _tool_id(call["id"]), "name": function["name"], "input": {}}
                yield from self._open("tool_use", **named)
            if function["arguments"]:
                self._arguments += function["arguments"]
                yield self._delta("input_json_delta", partial_json=function["arguments"])
        if part["finish_reason"] is not None:
            self.end = stop_of(part, self._stops)
            yield from self._close()

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        """The block that what follows goes into; the one before it ends where it is another."""
        if self._is_open and self.blocks[-1]["type"] == kind != "tool_use":
            return
        yield from self._close()
        self.blocks.append({"type": kind, **fields})
        self._is_open, self._arguments = True, ""
        begun = {"index": len(self.blocks) - 1, "content_block": dict(self.blocks[-1])}
        yield {"type": "content_block_start", **begun}

    def _more(self, name: str, kind: str, text: str) -> Event:
        self.blocks[-1][name] += text
        return self._delta(kind, **{name: text})

    def _delta(self, kind: str, **more: str) -> Event:
        delta = {"type": kind, **more}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        block, self._is_open = self.blocks[-1], False
        if block["type"] == "thinking":
            block["signature"] = _signature(block["thinking"])
            yield self._delta("signature_delta", signature=block["signature"])
        elif block["type"] == "tool_use":
            block["input"] = arguments_of(self._arguments)
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}


def _signature(thoughts: str) -> str:
    digest = hashlib.sha256(thoughts.encode("utf-8", "surrogatepass")).digest()
    return base64.b64encode(digest).decode()


def _tool_id(call_id: str) -> str:
    return "toolu_" + call_id.removeprefix("call_")
