"""GBNF, the grammars of llama.cpp: what they say, and the same in Lark for the compiler.

Rules are read and refused as llama.cpp b11549 (``src/llama-grammar.cpp``) does, and match the texts
that they match there. Knows no request and compiles nothing.
"""

from __future__ import annotations

from paceline.structured.gbnf.lark import lark_of
from paceline.structured.gbnf.parser import parsed
from paceline.text.token_pieces import TokenNames

__all__ = ["from_gbnf"]


def from_gbnf(text: str, tokens: TokenNames, *, is_whole: bool = True) -> str:
    """A grammar in Lark for one in GBNF.

    Args:
        is_whole: nothing is behind what the grammar matches.

    Raises:
        RequestError: it is malformed, leads back to itself from the left, or matches no text.
    """
    return lark_of(parsed(text, tokens), is_whole=is_whole)
