"""How far texts come in a GBNF grammar, in the terms of :mod:`tests.structured.llama_grammars`."""

from __future__ import annotations

from paceline.request.structured_outputs import StructuredOutputs
from paceline.structured.grammar import GrammarCompiler
from paceline.text.tokenizer import Tokenizer

END = 0
"""The token that ends a text in the embedded model's vocabulary."""


class Walk:
    """Texts through one grammar, character by character."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer, source: str) -> None:
        self._compiler, self._tokenizer = compiler, tokenizer
        self._spec = StructuredOutputs(grammar=source)

    def verdict(self, text: str) -> int:
        """How many characters are taken, negative where all are and more must follow."""
        (constraint,) = self._compiler.constraints(self._spec, 1)
        for place, character in enumerate(text):
            tokens = self._tokenizer.encode(character, add_special_tokens=False)
            if not constraint.takes(tokens):
                return place
            for token in tokens:
                constraint.advance(token)
        return len(text) if constraint.mask(())[0] & 1 << END else -len(text) - 1
