"""Encoders in which special tokens that a text spells out are mere text."""

from __future__ import annotations

import tokenizers

from paceline.api.llm import embedded_model
from paceline.text.tokenizer import literal_backend


class Whole:
    """A step that cuts nothing. It is written in Python, so that no file can hold it."""

    def pre_tokenize(self, text: tokenizers.PreTokenizedString) -> None:
        pass


def backend() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer.from_file(f"{embedded_model('target')}/tokenizer.json")
    for text, special in (("<s>", True), ("<|x|>", False), ("<h1>", False), ("  ", False)):
        found.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False)])
    return found


def test_what_becomes_a_token_and_what_does_not() -> None:
    usual = backend()
    (heading,) = usual.encode("<h1>").ids
    spaces = usual.encode("  ").ids
    literal = literal_backend(usual)
    assert [len(literal.encode(text).ids) > 1 for text in ("<s>", "<|x|>")] == [True, True]
    assert [literal.encode(text).ids for text in ("<h1>", "  ")] == [[heading], spaces]
    assert len(literal_backend(usual, {heading}).encode("<h1>").ids) > 1
    for text in ("<s>", "<|x|>"):  # the given encoder stays as it was
        assert len(usual.encode(text).ids) == 1


def test_the_vocabulary_is_not_read_again() -> None:
    """Not even where it could not be: a copy would be read from what the encoder writes."""
    usual = backend()
    usual.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(Whole())
    assert literal_backend(usual).encode("two words").ids == usual.encode("two words").ids
