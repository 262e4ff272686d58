"""Prompts from files, arguments and standard input, and as token ids. Knows no engine.

A chat stays a list of messages until the model's template is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.config.template_options import parse_template_options
from paceline.errors import ConfigError, RequestError
from paceline.workbench.serving.dataset_files import Content, prompt_of, read_rows

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, a chat as a list of messages, or token ids; ``kind`` is the file's own word for it,
    if any."""

    content: Content
    kind: str = ""


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSONL file of prompts; empty lines are skipped.

    Raises:
        RequestError: the file cannot be read, is empty, or a row is not a prompt; the message
            names the line.
    """
    rows = read_rows(path)
    return [Prompt(prompt_of(row, place), str(row.get("kind", ""))) for place, row in rows]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Prompts to token ids, by a model's chat template where it is wanted.

    Attributes:
        tokenizer: None lets token ids through alone.
        chat: whether texts become the first message of a chat; None means if there is a template.
        thinking: False asks the template to leave thoughts out.
        template_options: for the template besides.
    """

    tokenizer: Tokenizer | None
    chat: bool | None = None
    thinking: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)

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
        options = {**self.template_options, **({} if self.thinking else {"enable_thinking": False})}
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


class ChatOptions(Protocol):
    """The options of a command that say how a prompt becomes a chat."""

    @property
    def chat(self) -> bool | None: ...
    @property
    def no_thinking(self) -> bool: ...
    @property
    def default_chat_template_kwargs(self) -> str | None: ...


def encoder_of(tokenizer: Tokenizer | None, options: ChatOptions) -> Encoder:
    """What makes token ids of a command's prompts."""
    told = parse_template_options(options.default_chat_template_kwargs)
    return Encoder(tokenizer, options.chat, not options.no_thinking, told)
