"""Messages of a chat in the form in which chat templates read them. Renders nothing.

Owns what holds for every chat, from wherever it comes. Templates are written for what transformers
hands to them, and this follows it (5.23 and 5.24, ``utils/chat_template_utils.py``), but for two
things: a call without words keeps an empty content, which many templates read without asking
whether it is there, and thoughts have all of their names instead of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.core.errors import TemplateError
from paceline.text.shown_marks import DEEPSEEK_CALLS

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates and clients have an earlier answer's thoughts."""
_CALL_WITHOUT_WORDS = ("message['content'] is none", DEEPSEEK_CALLS)
"""What the templates of DeepSeek V3 and R1 know a call by."""


def with_opening(
    opening: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """The messages behind those that a model's owner put before each chat.

    A chat that begins with a system message of its own goes without theirs. As in Ollama (its
    ``ChatHandler``), but for the place of the chat's own: it stays the first.
    """
    if not opening or not messages:
        return messages
    own = int(begins_with_system(messages))
    theirs = [each for each in opening if not (own and _is_system(each))]
    return [*messages[:own], *theirs, *messages[own:]]


def begins_with_system(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a chat has a system message of its own."""
    return bool(messages) and _is_system(messages[0])


def _is_system(message: Mapping[str, Any]) -> bool:
    return isinstance(message, Mapping) and message.get("role") in ("system", "developer")


def read_by_templates(
    messages: Sequence[Mapping[str, Any]], mentions: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """The messages as a template reads them.

    Args:
        mentions: whether the template has these words.

    Raises:
        TemplateError: a message is no mapping.
    """
    wordless = None if all(map(mentions, _CALL_WITHOUT_WORDS)) else ""
    return [_with_all_thoughts(_with_content(message, wordless)) for message in messages]


def _with_content(message: Mapping[str, Any], wordless: str | None) -> dict[str, Any]:
    """The message without keys that say nothing; ``wordless`` is the content of a mere call."""
    if not isinstance(message, Mapping):
        raise TemplateError(
            f"a message of a chat has a role and a content; {str(message)[:40]!r} has not"
        )
    told = {key: value for key, value in message.items() if value is not None}
    if told.get("tool_calls"):
        return {**told, "content": told.get("content") or wordless}
    return {**told, "content": told.get("content", "")} if "content" in message else told


def _with_all_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its thoughts under each of their names."""
    names = [name for name in THOUGHTS if name in message]
    if not names:
        return message
    thoughts = message[names[0]]
    return {**dict.fromkeys(THOUGHTS, thoughts), **message, THOUGHTS[0]: thoughts}
