"""Prompts from files, arguments and standard input, and as token ids. Knows no engine.

A row of a prompts file holds its prompt under one of four names; a chat stays a list of messages
until the model's template is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

KEYS = ("prompt", "question", "turns", "messages")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, a chat as a list of messages, or token ids; ``kind`` is the file's own word for it,
    if any."""

    content: str | tuple[Mapping[str, Any], ...] | tuple[int, ...]
    kind: str = ""


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSONL file of prompts; empty lines are skipped.

    Raises:
        RequestError: the file cannot be read, is empty, or a row is not a prompt; the message
            names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read prompts from {path}: {error}") from error
    # Not splitlines: it also splits at separators that JSON strings may hold unescaped.
    lines = enumerate(text.split("\n"), start=1)
    prompts = [_parse_row(line, f"{path}, line {i}") for i, line in lines if line.strip()]
    if not prompts:
        raise RequestError(f"{path} holds no prompts")
    return prompts


def _parse_row(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RequestError(f"{place}: a row is an object, not {type(row).__name__}")
    key = next((name for name in KEYS if name in row), None)
    if key is None:
        raise RequestError(f"{place}: no prompt; a row has one of {', '.join(KEYS)}")
    value = row[key]
    if key == "messages":
        return Prompt(_messages(value, place), str(row.get("kind", "")))
    if key == "turns":
        value = value[0] if isinstance(value, list) and value else None
    if key == "prompt" and isinstance(value, list) and all(type(item) is int for item in value):
        value = tuple(value)
    elif not isinstance(value, str):
        value = None
    if not value:
        wanted = {"turns": "a list that begins with a text", "prompt": "a text, or token ids,"}
        raise RequestError(f"{place}: {key} must be {wanted.get(key, 'a text')} that is not empty")
    return Prompt(value, str(row.get("kind", "")))


def _messages(value: object, place: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"{place}: messages must be a list with at least one message")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"{place}: a message is an object with role and content")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Prompts to token ids, by a model's chat template where it is wanted.

    Attributes:
        tokenizer: None lets token ids through alone.
        chat: whether texts become the first message of a chat; None means if there is a template.
        thinking: False asks the template to leave thoughts out.
    """

    tokenizer: Tokenizer | None
    chat: bool | None = None
    thinking: bool = True

    @property
    def uses_chat(self) -> bool:
        return self._tokenizer.has_chat_template if self.chat is None else self.chat

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(
                "the model has no tokenizer, so it can read no text; give --prompts a file of "
                'token ids, with rows such as {"prompt": [1, 2, 3]}'
            )
        return self.tokenizer

    def encode(self, content: str | Sequence[Mapping[str, Any]] | Sequence[int]) -> list[int]:
        """Token ids of a text or a chat; token ids as they are.

        Raises:
            ConfigError: a text or a chat, and there is no tokenizer.
            RequestError: a chat where templates are switched off, or the text cannot be encoded.
            TemplateError: the template is missing, or refuses the messages.
        """
        if isinstance(content, str):
            if not self.uses_chat:
                return self._tokenizer.encode(content)
            messages: list[Any] = [{"role": "user", "content": content}]
        else:
            messages = list(content)
            if isinstance(messages[0], int):
                return messages
            if self.chat is False:
                raise RequestError(
                    "a list of messages needs the chat template, which --no-chat rules out"
                )
        options: dict[str, Any] = {} if self.thinking else {"enable_thinking": False}
        text = self._tokenizer.apply_chat_template(messages, **options)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Like :meth:`encode`, for each; errors say which prompt it was."""
        encoded = []
        for number, prompt in enumerate(prompts, start=1):
            try:
                encoded.append(self.encode(prompt.content))
            except RequestError as error:
                raise type(error)(f"prompt {number}: {error}") from error
        return encoded
