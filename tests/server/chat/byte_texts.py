"""Texts that a grammar takes, drawn byte by byte."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from paceline.request.structured_outputs import StructuredOutputs
from paceline.structured.grammar import LIMITS
from paceline.structured.lark import tag_grammar

LIKED = frozenset(b'ab15{}[]":,\n <>/nulltrefaxy09-.')
CLOSING = frozenset(b'"}]<\n)')
LONGEST = 600


@functools.cache
def _tokenizer() -> Any:
    return pytest.importorskip("llguidance").LLTokenizer("byte")


def byte_matcher(grammar: StructuredOutputs) -> Any:
    """
    Raises:
        AssertionError: the grammar does not compile.
    """
    llguidance = pytest.importorskip("llguidance")
    limits = llguidance.LLParserLimits(**LIMITS)
    text = tag_grammar(grammar.source)
    matcher = llguidance.LLMatcher(_tokenizer(), text, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def drawn(matcher: Any, draw: random.Random, ends: list[bytes]) -> str | None:
    """A whole text; None where the draw comes to no end.

    Args:
        ends: texts that end a value, which are tried now and then.
    """
    matcher, text = matcher.deep_copy(), bytearray()
    while len(text) < LONGEST:
        if matcher.is_stopped() or (matcher.is_accepting() and draw.random() < 0.5):
            return _decoded(text)
        end = draw.choice(ends) if draw.random() < 0.12 else b""
        tried = matcher.deep_copy() if end else None
        if tried is not None and tried.consume_tokens(list(end)):
            matcher = tried
            text += end
            continue
        byte = _next(matcher, draw)
        if byte is None or not matcher.consume_token(byte):
            return None
        text.append(byte)
    return None


def _next(matcher: Any, draw: random.Random) -> int | None:
    mask = matcher.compute_bitmask()
    allowed = [i for i in range(256) if mask[i // 8] >> (i % 8) & 1]
    liked = [i for i in allowed if i in LIKED]
    closing = [i for i in allowed if i in CLOSING]
    chance = draw.random()
    if closing and chance < 0.35:
        return draw.choice(closing)
    pool = liked if liked and chance < 0.95 else allowed
    return draw.choice(pool) if pool else None


def _decoded(text: bytearray) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None
