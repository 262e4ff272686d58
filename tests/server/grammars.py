"""Whether a text matches a grammar, as llguidance reads it."""

from __future__ import annotations

import functools

import pytest

from paceline.runtime.grammar import GrammarCompiler
from paceline.structured_outputs import StructuredOutputs
from tests.server.chats import chat_tokenizer


@functools.cache
def _compiler() -> GrammarCompiler:
    tokenizer = chat_tokenizer()
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def close() -> None:
    """End the process that tries grammars out; the next match starts another."""
    if _compiler.cache_info().currsize:
        _compiler().close()
        _compiler.cache_clear()


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


def _spells_on(bits: int, character: str) -> bool:
    """Whether one of few tokens, as forced text has them, begins with the character."""
    tokens = [i for i in range(bits.bit_length()) if bits >> i & 1]
    return len(tokens) < 9 and any(
        chat_tokenizer().decode([each]).startswith(character) for each in tokens
    )
