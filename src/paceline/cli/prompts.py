"""Prompts from files, arguments and standard input, and as token ids. Knows no engine.

A chat stays a list of messages until the model's template is known.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import ChatOptions
from paceline.config.template_options import parse_template_options
from paceline.core.errors import ConfigError, RequestError
from paceline.text.chat_templates import begins_with_system
from paceline.text.prompt_files import Content, prompt_of, read_rows

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer


PATIENCE = 1.0
"""Seconds without text after which a note says that standard input is read."""


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


def asked_prompt(prompt: str | None, question: Sequence[str] | None) -> str | None:
    """What the command line asks, by ``-p`` or as an argument, and what is piped in behind it.

    None where it asks nothing and a person sits at standard input.

    Raises:
        ConfigError: both ways were used.
        RequestError: what is piped in is no text.
    """
    if prompt is not None and question:
        raise ConfigError("the prompt is given twice: leave out -p, or the words after MODEL")
    asked = " ".join(question) if question else prompt
    if sys.stdin.isatty():
        return asked
    piped = _piped_text(names_itself=asked is not None)
    if asked is None:
        return piped
    return f"{asked}\n\n{piped}" if piped.strip() else asked


def _piped_text(names_itself: bool) -> str:
    """All of standard input.

    Args:
        names_itself: say so if it is slow, because the prompt came from elsewhere.
    """
    if names_itself and _is_silent():
        print(
            "waiting for the end of standard input (< /dev/null if there is none)", file=sys.stderr
        )
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not text: {error}") from error


def _is_silent() -> bool:
    """Whether nothing has come through standard input for a moment."""
    try:
        return not select.select([sys.stdin], [], [], PATIENCE)[0]
    except (OSError, ValueError):  # it has no descriptor, or none that can be waited for
        return False


@dataclass(frozen=True, slots=True)
class Encoder:
    """Prompts to token ids, by a model's chat template where it is wanted.

    Attributes:
        tokenizer: None lets token ids through alone.
        chat: whether texts become the first message of a chat; None means if there is a template.
        thinking: False asks the template to leave thoughts out.
        template_options: for the template besides.
        system: what a system message before the chat says; None is no such message. A chat that
            begins with its own keeps that.
    """

    tokenizer: Tokenizer | None
    chat: bool | None = None
    thinking: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None

    @property
    def uses_chat(self) -> bool:
        return self._tokenizer.has_chat_template if self.chat is None else self.chat

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(
                "the model has no tokenizer, so it cannot read text; give --prompts a file of "
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
                if self.system is not None:
                    raise ConfigError(
                        "--system needs a chat template, which is not applied here: put its text "
                        "before the prompt"
                    )
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
        if self.system is not None and not begins_with_system(messages):
            messages.insert(0, {"role": "system", "content": self.system})
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


def encoder_of(tokenizer: Tokenizer | None, options: ChatOptions) -> Encoder:
    """What makes token ids of a command's prompts."""
    template_options = parse_template_options(options.default_chat_template_kwargs)
    return Encoder(
        tokenizer, options.chat, not options.no_thinking, template_options, options.system
    )
