"""Bodies of ``/tokenize`` and ``/detokenize``, as vLLM and llama.cpp have them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.server.protocol.chat import Messages, Tools
from paceline.server.protocol.common import ApiModel, TokenId

MAX_TOKENS = 1 << 20

_SUBJECTS = {
    "prompt": ("add_special_tokens", "return_token_strs"),
    "messages": (
        *("add_special_tokens", "return_token_strs", "add_generation_prompt"),
        *("continue_final_message", "tools", "chat_template_kwargs"),
    ),
    "content": ("add_special", "parse_special", "with_pieces"),
}
"""What can be made tokens of, with the fields that belong to it."""
_OF_CHATS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


def _given(name: str) -> dict[str, Any]:
    """That a field is there and is not null, as a JSON schema."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class TokenizeRequest(ApiModel):
    """A text or the messages of a chat, as vLLM takes them, or llama.cpp's ``content``.

    That one is a text, or a list of texts and token ids in any order. Without ``parse_special``
    special tokens that a text spells out are mere text.
    """

    model_config = ConfigDict(json_schema_extra={"oneOf": [_given(name) for name in _SUBJECTS]})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    content: (
        str | Annotated[list[str | TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)] | None
    ) = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        given = [name for name in _SUBJECTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("prompt, messages or content must be given, and only one of them")
        own = _SUBJECTS[given[0]]
        for subject, names in _SUBJECTS.items():
            for name in names:
                if name not in own and getattr(self, name) is not None:
                    raise ValueError(f"{name} is for {subject} and not for {given[0]}")
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


class TokenPiece(BaseModel):
    """A token's text, or its bytes where they are no UTF-8."""

    id: int
    piece: str | list[int]


class ContentTokens(BaseModel):
    """What llama.cpp's ``content`` is answered with."""

    tokens: list[int] | list[TokenPiece]


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]


class DetokenizeResponse(BaseModel):
    """The text as vLLM tells it, and as llama.cpp does: the texts of all tokens in a row."""

    prompt: str
    content: str
