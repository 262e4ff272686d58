"""Reading the files that benchmarks take prompts from: JSONL, a JSON array, lines of a poem.

Knows no tokenizer: rows become prompts, and what the file says of the answer's length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RequestError

PROMPT_KEYS = ("prompt", "question", "turns", "messages")
_CONVERSATION_KEYS = ("conversations", "conversation", "messages")
_TEXT_KEYS = ("value", "content")


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of a file, with the answer or the length of it where the file has one."""

    prompt: str | tuple[Mapping[str, Any], ...]
    answer: str | None = None
    output_len: int | None = None


def read_lines(path: str) -> list[str]:
    """The lines of a text that are not empty.

    Raises:
        RequestError: the file cannot be read, or holds none.
    """
    lines = [line for line in _read(path).splitlines() if line.strip()]
    if not lines:
        raise RequestError(f"{path} holds no lines")
    return lines


def read_custom(path: str, category: str | None = None) -> list[Row]:
    """Rows with a prompt under one of :data:`PROMPT_KEYS`; of a list of turns, the first.

    Args:
        category: leave out rows of other categories.

    Raises:
        RequestError: the file cannot be read, or a row is no prompt; the message names the row.
    """
    rows = list(enumerate(_read_objects(path), start=1))
    if category is not None:
        found = sorted({str(row.get("category")) for _, row in rows})
        rows = [(number, row) for number, row in rows if row.get("category") == category]
        if not rows:
            raise RequestError(
                f"{path} has no rows of the category {category!r}; there are {', '.join(found)}"
            )
    return [_custom_row(row, f"{path}, row {number}") for number, row in rows]


def _custom_row(row: Mapping[str, Any], place: str) -> Row:
    key = next((name for name in PROMPT_KEYS if name in row), None)
    if key is None:
        raise RequestError(f"{place}: no prompt; a row has one of {', '.join(PROMPT_KEYS)}")
    value: Any = row[key]
    if key == "turns":
        value = value[0] if isinstance(value, list) and value else None
    if key == "messages":
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise RequestError(f"{place}: messages must be a list of objects")
        value = tuple(value)
    elif not isinstance(value, str):
        raise RequestError(f"{place}: {key} must hold a text")
    if not value:
        raise RequestError(f"{place}: {key} is empty")
    length = row.get("output_tokens")
    if length is not None and (type(length) is not int or length < 1):
        raise RequestError(f"{place}: output_tokens is {length!r}; it must be a number from 1 up")
    return Row(value, output_len=length)


def read_sharegpt(path: str) -> list[Row]:
    """The first two turns of each conversation that has them, as ShareGPT's export has it.

    Raises:
        RequestError: the file cannot be read, or has no conversation of two turns.
    """
    rows = [row for row in map(_conversation, _read_objects(path)) if row is not None]
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


def _read_objects(path: str) -> Sequence[Mapping[str, Any]]:
    """The objects of a JSON array or of a JSONL file."""
    text = _read(path)
    try:
        # Not splitlines: it also splits at separators that JSON strings may hold unescaped.
        lines = (line for line in text.split("\n") if line.strip())
        is_array = text.lstrip().startswith("[")
        rows = json.loads(text) if is_array else [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is neither a JSON array nor JSON lines: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise RequestError(f"{path} must hold objects, one per prompt")
    return list(rows)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error
