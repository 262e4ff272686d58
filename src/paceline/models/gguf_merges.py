"""Merge rules of a SentencePiece vocabulary, which stores scores instead. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.errors import ModelLoadError

_MAX_PIECE = 1024  # splitting a piece is quadratic in its length


def merges_from_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Pairs in the order in which they merge.

    SentencePiece joins the neighbours whose union has the highest score; so each split of a piece
    into two pieces is a rule that ranks by the piece's score, ties by the pieces' ids.

    Raises:
        ModelLoadError: a piece is absurdly long.
    """
    rules: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        if len(piece) > _MAX_PIECE:
            raise ModelLoadError(f"the vocabulary has a token of {len(piece)} characters")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                rules.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    rules.sort()
    return [(left, right) for *_, left, right in rules]
