"""Where the tokens of an answer stand in its text, told when their text is certain.

What is told does not depend on how the answer was cut into pieces. Knows no part of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.request.request import TokenLogprobs
from paceline.server.engine_process.messages import Piece
from paceline.text.detokenizer import IncrementalDecoder, has_text
from paceline.text.tokenizer import Tokenizer


class Placed(NamedTuple):
    """A token whose text is certain: its first character, the one behind its last, and its
    log-probs where there are some.
    """

    start: int
    end: int
    logprobs: TokenLogprobs | None


class TokenPlaces:
    """Follows one sample. Tokens without text, such as that of the end, have no place."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, prompt_token_ids)
        self._length = 0  # of the text that is certain
        self._uncertain: list[TokenLogprobs | None] = []  # of tokens whose text is to come

    def take(self, piece: Piece) -> list[Placed]:
        """The tokens whose text became certain with a piece.

        Those that only together are whole characters have one place.
        """
        placed = list[Placed]()
        count = len(piece.token_ids)
        entries: Sequence[TokenLogprobs | None] = piece.logprobs or [None] * count
        for token_id, entry in zip(piece.token_ids, entries, strict=True):
            if has_text(self._tokenizer, token_id):
                self._uncertain.append(entry)
                placed += self._place(self._decoder.push(token_id))
        if piece.finish_reason is not None:
            placed += self._place(self._decoder.flush())
        return placed

    def _place(self, text: str) -> list[Placed]:
        """Text has become certain: it is that of the tokens that had none yet."""
        if not text:
            return []
        start, self._length = self._length, self._length + len(text)
        placed = [Placed(start, self._length, entry) for entry in self._uncertain]
        self._uncertain.clear()
        return placed
