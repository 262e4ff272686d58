"""Where the tokens of an answer stand in its text, told when their text is certain.

What is told does not depend on how the answer was cut into pieces. Knows no part of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from paceline.models.detokenizer import IncrementalDecoder, has_text
from paceline.models.tokenizer import Tokenizer
from paceline.server.messages import Piece

Item = TypeVar("Item")


class TokenPlaces(Generic[Item]):
    """Follows one sample. Tokens without text, such as that of the end, have no place."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, prompt_token_ids)
        self._length = 0  # of the text that is certain
        self._uncertain: list[Item] = []  # of tokens whose text is to come

    def take(self, piece: Piece, items: Sequence[Item]) -> list[tuple[int, int, Item]]:
        """
        Args:
            items: what is to be told with each token of the piece.

        Returns:
            the first character of a token, the one behind its last, and its item. Tokens that only
            together are whole characters have one place.
        """
        placed = list[tuple[int, int, Item]]()
        for token_id, item in zip(piece.token_ids, items, strict=True):
            if has_text(self._tokenizer, token_id):
                self._uncertain.append(item)
                placed += self._place(self._decoder.push(token_id))
        if piece.finish_reason is not None:
            placed += self._place(self._decoder.flush())
        return placed

    def _place(self, text: str) -> list[tuple[int, int, Item]]:
        """Text has become certain: it is that of the tokens that had none yet."""
        if not text:
            return []
        start, self._length = self._length, self._length + len(text)
        placed = [(start, self._length, item) for item in self._uncertain]
        self._uncertain.clear()
        return placed
