"""What ``/v1/chat/completions`` answers with. Owns names and types."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from paceline.server.protocol.chat import MessageToolCall
from paceline.server.protocol.completions import UsageBody

UNENFORCED = "x-paceline-unenforced-schema-keywords"
"""The header of an answer whose schema has keywords that no grammar can enforce: their names."""


class ChatResponseMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatResponseMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None


class ChatCompletionResponse(BaseModel):
    """What a chat is answered with; events of a stream have ``delta`` in place of ``message``."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody | None
