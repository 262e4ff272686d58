"""Bodies of ``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.server.protocol.chat import Messages, Tools
from paceline.server.protocol.common import ApiModel, TokenId

MAX_TOKENS = 1 << 20

_OF_CHATS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


def _given(name: str) -> dict[str, Any]:
    """That a field is there and is not null, as a JSON schema."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class TokenizeRequest(ApiModel):
    """A text, or the messages of a chat."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_given("prompt"), _given("messages")]})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be given, and not both")
        for name in _OF_CHATS:
            if self.prompt is not None and getattr(self, name) is not None:
                raise ValueError(f"{name} is for messages and not for a prompt")
        return self

    @property
    def chat(self) -> dict[str, Any]:
        """What a chat with these messages would say."""
        given = {name: getattr(self, name) for name in _OF_CHATS}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {"messages": self.messages, **chosen}


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]


class DetokenizeResponse(BaseModel):
    prompt: str
