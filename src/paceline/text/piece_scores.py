"""Joining characters to pieces by the pieces' scores, as SentencePiece does.

Of all neighbours whose union is a piece, those join first whose union has the highest score, and of
equal ones the leftmost. Usually an order of merges says the same, and the backend can follow that.
Where different pieces share a score it cannot, and :class:`ScoredPieces` joins them here. Knows
neither files nor special tokens.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from paceline.core.errors import ModelLoadError

_SPACE = "▁"
_MAX_PIECE = 1024  # splitting a piece is quadratic in its length


def merges_from_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Pairs in the order in which they merge, the best score first.

    Among equal scores the longest left part comes first. So runs of one character, which Mistral's
    vocabularies score alike, grow from the left.

    Raises:
        ModelLoadError: a piece is absurdly long.
    """
    rules: list[tuple[float, int, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        if len(piece) > _MAX_PIECE:
            raise ModelLoadError(f"the vocabulary has a token of {len(piece)} characters")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                rules.append((-scores[index], -cut, -len(piece), index, left, right))
    rules.sort()
    return [(left, right) for *_, left, right in rules]


def scores_tie(pieces: Mapping[str, float]) -> bool:
    """Whether an order of merges is not enough: different pieces, of those that come about by
    merging, may compete with one score.
    """
    first: dict[float, str] = {}
    for piece, score in pieces.items():
        if len(piece) > 1:
            other = first.setdefault(score, piece)
            if set(piece) != set(other) or (len(set(piece)) > 1 and piece != other):
                return True
    return False


def with_scored_pieces(
    backend: tokenizers.Tokenizer, scores: Mapping[str, float]
) -> tokenizers.Tokenizer:
    """A copy of a backend in which pieces join by these scores; such a one cannot be written."""
    document = json.loads(backend.to_str())
    document["model"] |= {"merges": [], "ignore_merges": True}  # each part is a piece already
    copy = tokenizers.Tokenizer.from_str(json.dumps(document))
    copy.encode_special_tokens = backend.encode_special_tokens  # which is not part of the text
    joining = pre_tokenizers.PreTokenizer.custom(ScoredPieces(scores))
    if any(_SPACE in piece.lstrip(_SPACE) for piece in scores):
        copy.pre_tokenizer = joining
    else:  # no piece reaches from one word into the next
        words = pre_tokenizers.Split(tokenizers.Regex(f"{_SPACE}+[^{_SPACE}]*"), "isolated")
        copy.pre_tokenizer = pre_tokenizers.Sequence([words, joining])
    return copy


class ScoredPieces:
    """A step of the backend that cuts a word into pieces by their scores; single characters need
    none.
    """

    def __init__(self, scores: Mapping[str, float]) -> None:
        self._scores = scores
        self._lengths = lru_cache(maxsize=1 << 16)(self._piece_lengths)

    def pre_tokenize(self, text: tokenizers.PreTokenizedString) -> None:
        """Cut every part of a text; the backend calls this."""
        text.split(self._cut)

    def _cut(self, _index: int, word: Any) -> list[Any]:
        begin, parts = 0, []
        for length in self._lengths(str(word)):
            parts.append(word[begin : begin + length])
            begin += length
        return parts

    def _piece_lengths(self, word: str) -> list[int]:
        """Characters of each piece. A joined piece lies where its first character was."""
        lengths = [1] * len(word)
        before = list(range(-1, len(word) - 1))  # where the piece before begins
        waiting: list[tuple[float, int, int]] = []

        def propose(left: int, right: int) -> None:
            if left >= 0 and right < len(word):
                end = right + lengths[right]
                score = self._scores.get(word[left:end])
                if score is not None:
                    heapq.heappush(waiting, (-score, left, end))

        for right in range(1, len(word)):
            propose(right - 1, right)
        while waiting:
            _, left, end = heapq.heappop(waiting)
            right = left + lengths[left]
            if not lengths[left] or right >= end or right + lengths[right] != end:
                continue  # one of the two has been joined since
            lengths[left], lengths[right] = end - left, 0
            if end < len(word):
                before[end] = left
            propose(before[left], left)
            propose(left, end)
        return [length for length in lengths if length]
