"""The constraint of a text that none holds for. Knows no thoughts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.request.span import DraftTree


class Anything:
    """Allows any token anywhere, with the methods of ``Constraint``."""

    is_complete = False

    def __init__(self, vocab_size: int) -> None:
        self._mask = everything(vocab_size)

    def advance(self, token_id: int) -> None:
        pass

    def mask(self, path: Sequence[int]) -> bytes:
        return self._mask

    def takes(self, path: Sequence[int]) -> bool:
        return True

    def legal(self, tree: DraftTree) -> DraftTree:
        return tree

    def certain(self, path: Sequence[int]) -> int | None:
        return None

    def usual(self, path: Sequence[int]) -> int | None:
        return None

    def alternatives(self, path: Sequence[int], most: int) -> list[int]:
        return []


def everything(vocab_size: int) -> bytes:
    """The mask of all tokens."""
    return ((1 << vocab_size) - 1).to_bytes(-(-vocab_size // 8), "little")
