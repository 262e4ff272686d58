"""What a server or a command tells every chat template. Owns the checks; knows no template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.core.errors import ConfigError

OPTION = "--default-chat-template-kwargs"
PROTECTED = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"),
    *("tokenize", "self", "text_begin"),
)
"""Variables of a template that say what a request says itself, as names with ``_token`` do."""


def protected_among(names: Iterable[str]) -> str | None:
    """The first name that stands for something options cannot replace."""
    return next((name for name in names if name in PROTECTED or name.endswith("_token")), None)


def check_template_options(options: Any) -> None:
    """
    Raises:
        ConfigError: they are no object, or would replace messages, tools or special tokens.
    """
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ConfigError(
            f"{OPTION} is {str(options)[:60]!r}; allowed: an object such as "
            '{"enable_thinking": false}'
        )
    name = protected_among(options)
    if name is not None:
        raise ConfigError(
            f"{OPTION} holds {name[:60]!r}, which each request sets itself; leave it out"
        )


def parse_template_options(text: str | None) -> dict[str, Any]:
    """The options in JSON; none where there is no text.

    Raises:
        ConfigError: it is not valid JSON; otherwise as :func:`check_template_options`.
    """
    if text is None:
        return {}
    try:
        options: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{OPTION} {text!r} is not valid JSON: {error}") from error
    check_template_options(options)
    return options
