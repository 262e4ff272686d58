"""Log-probabilities of a chat: of all its tokens, or of those alone that its words consist of.

Owns the format, one object per token, and which part of an answer tells which token. Knows no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from paceline.request.request import TokenLogprobs
from paceline.server.chat.parts import Part, Places, Words
from paceline.server.chat.token_places import Placed
from paceline.server.engine_process.messages import Piece
from paceline.server.engine_process.tokens import TokenTexts, finite


class ChatLogprobs(Protocol):
    """Adds the log-probabilities of one sample to the parts of its choice.

    Attributes:
        needs_places: of the tokens.
    """

    needs_places: ClassVar[bool]

    def tell(
        self,
        piece: Piece,
        placed: Sequence[Placed],
        told: Sequence[Part],
        parts: Sequence[dict[str, Any]],
    ) -> None:
        """
        Args:
            piece: what came; it has tokens.
            placed: those whose places are known with it.
            told: the parts of the answer that became certain with it.
            parts: the choice's parts that tell them, in the same order; at least one.
        """
        ...


class AllLogprobs:
    """Those of every token, that of the end included, told when the token comes."""

    needs_places: ClassVar[bool] = False

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def tell(
        self,
        piece: Piece,
        placed: Sequence[Placed],
        told: Sequence[Part],
        parts: Sequence[dict[str, Any]],
    ) -> None:
        parts[0]["logprobs"] = {"content": [entry_of(each, self._texts) for each in piece.logprobs]}


class WordLogprobs:
    """Those of the tokens that words consist of, in whole or in part, told with these words.

    Thoughts, calls, marks, what a stop string cuts off, and the end have none.
    """

    needs_places: ClassVar[bool] = True

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._placed = deque[Placed]()

    def tell(
        self,
        piece: Piece,
        placed: Sequence[Placed],
        told: Sequence[Part],
        parts: Sequence[dict[str, Any]],
    ) -> None:
        self._placed.extend(placed)
        for part, choice in zip(told, parts, strict=False):
            if isinstance(part, Words):
                found = self._take(part.places)
                choice["logprobs"] = {"content": [entry_of(each, self._texts) for each in found]}

    def _take(self, places: Places) -> list[TokenLogprobs]:
        """Those of the tokens at these places; what comes before is not asked for again."""
        taken, last = list[TokenLogprobs](), places[-1][1]
        while self._placed and self._placed[0][0] < last:
            start, end, entry = self._placed.popleft()
            if entry is not None and any(start < stop and begin < end for begin, stop in places):
                taken.append(entry)
        return taken


def entry_of(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    """A token with the likeliest ones at its place."""
    top = [_token(*each, texts) for each in entry.top]
    return {**_token(entry.token_id, entry.logprob, texts), "top_logprobs": top}


def _token(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {
        "token": texts.text(token_id),
        "logprob": finite(logprob),
        "bytes": list(texts.raw(token_id)),
    }
