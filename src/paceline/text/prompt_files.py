"""Reading files of prompts: JSONL, a JSON array, lines of a poem.

Knows no tokenizer: rows become prompts, and what the file says of the answer's length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from paceline.core.errors import RequestError

PROMPT_KEYS = ("prompt", "question", "turns", "messages")
Content = str | tuple[Mapping[str, Any], ...] | tuple[int, ...]
"""A text, a chat as a list of messages, or token ids."""
_CONVERSATION_KEYS = ("conversations", "conversation", "messages")
_TEXT_KEYS = ("value", "content")


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of a file, with the answer or the length of it where the file has one."""

    prompt: str | tuple[Mapping[str, Any], ...]
    answer: str | None = None
    output_len: int | None = None


def read_lines(path: str) -> list[str]:
    """The lines of a text that are not empty; ``RequestError`` where there are none."""
    lines = [line for line in _read(path).splitlines() if line.strip()]
    if not lines:
        raise RequestError(f"{path} holds no lines")
    return lines


def read_custom(path: str, category: str | None = None) -> list[Row]:
    """Rows with a prompt that is no list of token ids, of this category if one is given.
    ``RequestError`` where the file cannot be read, or a row is no prompt; the message names the
    row.
    """
    rows = read_rows(path)
    if category is not None:
        found = sorted({str(row.get("category")) for _, row in rows})
        rows = [(place, row) for place, row in rows if row.get("category") == category]
        if not rows:
            raise RequestError(
                f"{path} has no rows of the category {category!r}; there are {', '.join(found)}"
            )
    return [_custom_row(row, place) for place, row in rows]


def _custom_row(row: Mapping[str, Any], place: str) -> Row:
    content, length = prompt_of(row, place), row.get("output_tokens")
    if isinstance(content[0], int):
        raise RequestError(f"{place}: prompt must be a text: servers are sent texts")
    if length is not None and (type(length) is not int or length < 1):
        raise RequestError(f"{place}: output_tokens is {length!r}; it must be a number from 1 up")
    return Row(cast("str | tuple[Mapping[str, Any], ...]", content), output_len=length)


def prompt_of(row: Mapping[str, Any], place: str) -> Content:
    """What a row asks, under one of :data:`PROMPT_KEYS`; of a list of turns, the first.
    ``RequestError``, whose message begins with ``place``, where it asks nothing.
    """
    key = next((name for name in PROMPT_KEYS if name in row), None)
    if key is None:
        raise RequestError(f"{place}: no prompt; a row has one of {', '.join(PROMPT_KEYS)}")
    value = row[key]
    if key == "messages":
        return _messages(value, place)
    if key == "turns":
        value = value[0] if isinstance(value, list) and value else None
    if key == "prompt" and isinstance(value, list) and all(type(item) is int for item in value):
        value = tuple(value)
    elif not isinstance(value, str):
        value = None
    if not value:
        wanted = {"turns": "a list that begins with a text", "prompt": "a text, or token ids,"}
        raise RequestError(f"{place}: {key} must be {wanted.get(key, 'a text')} that is not empty")
    return cast(Content, value)


def _messages(value: object, place: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"{place}: messages must be a list with at least one message")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"{place}: a message is an object with role and content")
    return tuple(value)


def read_sharegpt(path: str) -> list[Row]:
    """The first two turns of each conversation that has them, as ShareGPT's export has it."""
    rows = [row for row in (_conversation(row) for _, row in read_rows(path)) if row is not None]
    if not rows:
        keys = ", ".join(_CONVERSATION_KEYS)
        raise RequestError(f"{path} has no conversation of two turns under any of {keys}")
    return rows


def _conversation(row: Mapping[str, Any]) -> Row | None:
    turns = next((row[key] for key in _CONVERSATION_KEYS if key in row), None)
    texts = [_turn_text(turn) for turn in turns[:2]] if isinstance(turns, list) else []
    if len(texts) < 2 or not all(texts):
        return None
    return Row(texts[0], answer=texts[1])


def _turn_text(turn: object) -> str:
    values = (turn.get(key) for key in _TEXT_KEYS) if isinstance(turn, dict) else ()
    return next((value for value in values if isinstance(value, str)), "")


def read_rows(path: str | Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The objects of a JSON array or of a JSONL file, each with where it is; at least one.
    ``RequestError`` where the file cannot be read, is empty, or has something else; the message
    names the line.
    """
    text = _read(path)
    if text.lstrip().startswith("["):
        found = enumerate(_parsed(text, str(path)), start=1)
        rows = [(f"{path}, row {number}", row) for number, row in found]
    else:
        # Not splitlines: it also splits at separators that JSON strings may hold unescaped.
        lines = [(f"{path}, line {i}", line) for i, line in enumerate(text.split("\n"), start=1)]
        rows = [(place, _parsed(line, place)) for place, line in lines if line.strip()]
    if not rows:
        raise RequestError(f"{path} holds no prompts")
    for place, row in rows:
        if not isinstance(row, dict):
            raise RequestError(f"{place}: a row is an object, not {type(row).__name__}")
    return rows


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: not JSON: {error}") from error


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read prompts from {path}: {error}") from error
