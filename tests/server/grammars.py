"""Whether a text matches a grammar, as llguidance reads it."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

import pytest
import tokenizers

from paceline.request.structured_outputs import StructuredOutputs
from paceline.structured.grammar import GrammarCompiler
from paceline.text.chat_templates import SHOWN_MARKS
from paceline.text.tokenizer import Tokenizer
from paceline.text.tokenizer_files import read_tokenizer_folder
from tests.server.chats import chat_tokenizer


@functools.cache
def _compiler() -> GrammarCompiler:
    return _compiler_for(chat_tokenizer())


def _compiler_for(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


@functools.cache
def marked_tokenizer() -> Tokenizer:
    """The embedded tokenizer, with marks of thoughts and calls as special tokens."""
    parts = read_tokenizer_folder(Path(str(files("paceline") / "embedded" / "target")))
    marks = [tokenizers.AddedToken(text, special=True) for text in sorted(SHOWN_MARKS)]
    parts.backend.add_special_tokens(marks)
    return Tokenizer(parts.backend, special_tokens=parts.special_tokens)


@functools.cache
def _marked_compiler() -> GrammarCompiler:
    return _compiler_for(marked_tokenizer())


def close() -> None:
    """End the process that tries grammars out; the next match starts another."""
    for each in (_compiler, _marked_compiler):
        if each.cache_info().currsize:
            each().close()
            each.cache_clear()


def matches(grammar: StructuredOutputs, text: str) -> bool:
    """Whether a text, thoughts included, may be a whole answer."""
    pytest.importorskip("llguidance")
    (constraint,) = _compiler().constraints(grammar, 1)
    tokenizer = chat_tokenizer()
    for character in text:  # one by one, since forced text has one spelling in tokens
        for token in tokenizer.encode(character, add_special_tokens=False):
            bits = int.from_bytes(constraint.mask(()), "little")
            if not bits >> token & 1 and not _spells_on(bits, character):
                return False
            constraint.advance(token)
    (end,) = tokenizer.eos_token_ids
    return bool(constraint.mask(())[end // 8] >> end % 8 & 1)


def any_text(grammar: StructuredOutputs, seed: int, longest: int = 3000) -> str:
    """A text that the grammar takes, drawn token by token; it ends as soon as it may."""
    pytest.importorskip("llguidance")
    (constraint,) = _compiler().constraints(grammar, 1)
    tokenizer, draw = chat_tokenizer(), random.Random(seed)
    (end,) = tokenizer.eos_token_ids
    token_ids = list[int]()
    while len(token_ids) < longest:
        bits = int.from_bytes(constraint.mask(()), "little")
        if bits >> end & 1:
            return tokenizer.decode(token_ids)
        token_ids.append(draw.choice([i for i in range(bits.bit_length()) if bits >> i & 1]))
        constraint.advance(token_ids[-1])
    raise AssertionError(f"no end: {tokenizer.decode(token_ids)!r}")


def matches_in_tokens(grammar: StructuredOutputs, token_ids: Iterable[int]) -> bool:
    """Whether tokens of :func:`marked_tokenizer` may be a whole answer."""
    pytest.importorskip("llguidance")
    (constraint,) = _marked_compiler().constraints(grammar, 1)
    (end,) = marked_tokenizer().eos_token_ids
    for token in (*token_ids, end):
        if not constraint.mask(())[token // 8] >> token % 8 & 1:
            return False
        if token != end:
            constraint.advance(token)
    return True


def _spells_on(bits: int, character: str) -> bool:
    """Whether one of few tokens, as forced text has them, begins with the character."""
    tokens = [i for i in range(bits.bit_length()) if bits >> i & 1]
    return len(tokens) < 9 and any(
        chat_tokenizer().decode([each]).startswith(character) for each in tokens
    )
