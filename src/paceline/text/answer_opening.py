"""With which tokens a chat template opens an answer, and where that is in a prompt.

The next turn of a chat has the same text up to there, but often not beyond: templates leave
thoughts out of earlier answers, and the marks with which they open them. Only caching goes by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.errors import RequestError
from paceline.text.tokenizer import Tokenizer

LONGEST = 16
"""Tokens that may stand between the earlier text and the answer."""
_CHAT = [{"role": "user", "content": "Hello."}]
_SWITCHES: Sequence[dict[str, Any]] = ({}, {"enable_thinking": True}, {"enable_thinking": False})


def answer_opening(tokenizer: Tokenizer | None) -> list[int]:
    """What all answers begin with, however thinking is switched; empty where nothing is known."""
    if tokenizer is None or not tokenizer.has_chat_template:
        return []
    try:
        openings = [_opening(tokenizer, options) for options in _SWITCHES]
    except RequestError:
        return []
    same = (len(set(each)) == 1 for each in zip(*openings, strict=False))
    count = next((i for i, is_same in enumerate(same) if not is_same), min(map(len, openings)))
    return openings[0][:count]


def _opening(tokenizer: Tokenizer, options: dict[str, Any]) -> list[int]:
    before, whole = (
        tokenizer.apply_chat_template(_CHAT, add_generation_prompt=opens, **options)
        for opens in (False, True)
    )
    added = whole.removeprefix(before) if whole.startswith(before) else ""
    return tokenizer.encode(added, add_special_tokens=False)


def resume_point(token_ids: Sequence[int], opening: Sequence[int]) -> int:
    """Where the opening of the answer begins at the end of a prompt; 0 where there is none."""
    for start in range(len(token_ids) - len(opening), len(token_ids) - LONGEST - 1, -1):
        if start <= 0 or not opening:
            break
        if list(token_ids[start : start + len(opening)]) == list(opening):
            return start
    return 0
