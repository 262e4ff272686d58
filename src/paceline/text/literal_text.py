"""Encoding texts in which special tokens that are written out are mere text. Knows no requests."""

from __future__ import annotations

import re
from collections.abc import Collection

import tokenizers

_CONTROL = re.compile(r"<[|｜].+[|｜]>")  # noqa: RUF001


def literal_backend(
    backend: tokenizers.Tokenizer, marks: Collection[int] = ()
) -> tokenizers.Tokenizer:
    """An encoder that takes no special token out of a text. It can only encode.

    Added tokens that are words of texts, such as runs of spaces, stay. Some vocabularies call
    marks ordinary words; what is spelled ``<|...|>`` is taken for one. The vocabulary itself is
    shared with the given encoder: to read a copy of 262,144 tokens takes seconds, during which no
    other thread of Python runs (tokenizers 0.23.3).

    Args:
        marks: ids of further tokens that a text shall not become.
    """
    literal = tokenizers.Tokenizer(backend.model)
    literal.normalizer, literal.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    literal.post_processor = backend.post_processor
    added = sorted(backend.get_added_tokens_decoder().items())
    for token_id, token in added:
        token.special |= token_id in marks or bool(_CONTROL.fullmatch(token.content))
    literal.add_tokens([token for _, token in added])
    literal.encode_special_tokens = True
    return literal
