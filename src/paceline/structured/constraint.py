"""A grammar's matcher as the constraint of one request. Owns where the matcher stands.

The matcher is moved along paths of drafts and back by rolling back; what of a path is committed
needs no second step. Knows no specification: :mod:`paceline.structured.grammar` makes these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.errors import UnservableRequestError
from paceline.request.span import ROOT, DraftTree

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


LEAST_FORCED_BYTES = 2
"""Of a string that has to follow; one byte alone is most often part of a longer token."""
MAX_SPELLINGS = 24
"""Allowed tokens up to which it is worth looking for the few strings behind them."""


class MatcherConstraint:
    """The methods are those of :class:`~paceline.request.request.Constraint`."""

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, eos_token_ids: Sequence[int]
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._committed: list[int] = []
        self._ahead: list[int] = []  # tokens after the committed ones that the matcher has taken
        self._ends: list[bool] = []  # for each of these whether nothing may follow it
        self._is_complete = False
        self._run: tuple[list[int], list[int]] = ([], [])  # a path and what is certain behind it

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    def advance(self, token_id: int) -> None:
        if self._ahead[:1] != [token_id]:
            self._move_to([token_id])
        self._is_complete = self._ends[0]
        self._committed.append(token_id)
        self._run = [], []
        del self._ahead[0], self._ends[0]

    def mask(self, path: Sequence[int]) -> bytes:
        self._move_to(self._without_end(path))
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def takes(self, path: Sequence[int]) -> bool:
        """Whether the text of the path may follow, in whatever tokens it is spelled."""
        self._move_to(())
        count = self._matcher.validate_tokens(list(path))
        self._check()
        return bool(count == len(path))

    def legal(self, tree: DraftTree) -> DraftTree:
        self._move_to(())
        tokens, parents = tree.token_ids, tree.parents
        forced = self._matcher.compute_ff_tokens()
        kept: set[int] = set()
        inner = set(parents)
        for leaf in range(len(tree)):
            if leaf in inner:
                continue
            nodes = _path_to(leaf, parents)
            path = [tokens[node] for node in nodes]
            count = self._matcher.validate_tokens(path)
            # Of a forced string the matcher takes any spelling, but its mask allows only one.
            for at, (token, only) in enumerate(zip(path, forced, strict=False)):
                if token != only:
                    count = min(count, at)
                    break
            kept.update(nodes[:count])
        self._check()
        return tree if len(kept) == len(tree) else tree.select(sorted(kept))

    def certain(self, path: Sequence[int]) -> int | None:
        if self._ends_text(path):
            return None
        head, run = self._run
        done = len(path) - len(head)
        if not (
            0 <= done < len(run) and path[: len(head)] == head and path[len(head) :] == run[:done]
        ):
            self._move_to(path)
            head, run = self._run = list(path), self._matcher.compute_ff_tokens()
            done = 0
        return run[done] if run else None

    def usual(self, path: Sequence[int]) -> int | None:
        if self._ends_text(path):
            return None
        self._move_to(path)
        text = self._matcher.compute_ff_bytes()
        if len(text) < LEAST_FORCED_BYTES:
            return None
        tokens = self._tokenizer.tokenize_bytes(text)
        return tokens[0] if tokens and self._matcher.validate_tokens(tokens[:1]) else None

    def alternatives(self, path: Sequence[int], most: int) -> list[int]:
        if self._ends_text(path):
            return []
        bits = int.from_bytes(self.mask(path), "little")
        if bits.bit_count() > MAX_SPELLINGS:
            return []
        spelt = []
        while bits:
            token = (bits & -bits).bit_length() - 1
            bits &= bits - 1
            spelt.append((self._tokenizer.decode_bytes([token]), token))
        spelt.sort()
        # A token that begins another one is a part of its string, hardly ever the way to spell it.
        longest = [
            token
            for at, (text, token) in enumerate(spelt)
            if at + 1 == len(spelt) or not spelt[at + 1][0].startswith(text)
        ]
        return longest if len(longest) <= most else []

    def _ends_text(self, path: Sequence[int]) -> bool:
        return self._is_complete or not self._eos.isdisjoint(path)

    def _without_end(self, path: Sequence[int]) -> Sequence[int]:
        if self._eos.isdisjoint(path):
            return path
        return path[: next(at for at, token in enumerate(path) if token in self._eos)]

    def _move_to(self, path: Sequence[int]) -> None:
        ahead, shared = self._ahead, 0
        for known, token in zip(ahead, path, strict=False):
            if known != token:
                break
            shared += 1
        surplus = len(ahead) - shared
        if surplus:
            del ahead[shared:], self._ends[shared:]
            if not self._matcher.rollback(surplus):
                self._check()
        for token in path[shared:]:
            if not self._matcher.consume_token(token):
                self._check()
            ahead.append(token)
            self._ends.append(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            at = len(self._committed)
            raise UnservableRequestError(
                f"the grammar failed after {at} tokens: {_first_line(self._matcher.get_error())}"
            )


def _path_to(node: int, parents: Sequence[int]) -> list[int]:
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:200]


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
