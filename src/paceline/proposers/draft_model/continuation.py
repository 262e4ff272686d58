"""A text of the draft as tokens of the target. Knows no request and no model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.proposers.draft_model.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens of the target for a text.

    Attributes:
        ends: bytes of the text after which each token ends.
        settled: how many of them are likely to stay what they are, whatever text follows.
    """

    tokens: list[int]
    ends: list[int]
    settled: int


def continuation(
    target: Vocabulary, recent: Sequence[int], is_all: bool, text: bytes
) -> Continuation:
    """The target's tokens for a text after its tokens so far.

    They are what the target's tokenizer makes of the text with the tokens before it; none where
    it would merge the two, since then it would not have ended a token here.

    Args:
        recent: the last tokens, none of them special.
        is_all: the text begins with them.
        text: what follows, not necessarily whole characters.
    """
    known = target.written(recent)
    is_start = is_all and known.startswith(target.prefix)
    if is_all and not known:
        known, is_start = target.prefix, True
    while known and not is_start and not begins_character(known, 0):
        known = known[1:]
    data = _valid(known + text)
    if len(data) <= len(known):
        return Continuation([], [], 0)
    tokens, ends = target.encode(data, is_start)
    begin = len(known) if recent else 0  # of what the target still has to write
    first = bisect_right(ends, begin)
    if first and ends[first - 1] != begin:
        return Continuation([], [], 0)
    count = _writable(target, tokens[first:], ends[first:], begin)
    tokens = tokens[first : first + count]
    ends = [end - len(known) for end in ends[first : first + count]]
    return Continuation(tokens, ends, target.settled(data[len(known) :], ends))


def _writable(target: Vocabulary, tokens: Sequence[int], ends: Sequence[int], begin: int) -> int:
    """How many tokens write just what lies between their ends."""
    for count, (token, end) in enumerate(zip(tokens, ends, strict=True)):
        if len(target.piece(token) or b"") != end - begin:
            return count
        begin = end
    return len(tokens)


def begins_character(data: bytes, at: int) -> bool:
    """Whether a character of UTF-8 begins at a place, or the text ends there."""
    return at >= len(data) or data[at] & 0xC0 != 0x80


def _valid(data: bytes) -> bytes:
    """The leading bytes that are whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start]
    return data
