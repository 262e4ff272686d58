"""The marks of thoughts in one vocabulary: the tokens that can open and close them.

Owns the tables by which a constraint finds these tokens. Knows no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.request.structured_outputs import ThoughtMarks


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of thoughts as bytes, and the tokens of a vocabulary that matter to them.

    Attributes:
        pieces: what each token writes; empty where it writes nothing.
        eos_token_ids: tokens that end a text.
        free: the mask of thoughts.
        closers: tokens that can complete a closing mark and write more, by the part of it before
            them.
        openers: tokens that can go on with an opening mark, by the part of it before them.
        spellings: the longest token that a closing mark can go on with, by the part of it that is
            to come.
    """

    opening: tuple[bytes, ...]
    closing: tuple[bytes, ...]
    pieces: Sequence[bytes]
    eos_token_ids: frozenset[int]
    free: bytes
    closers: dict[bytes, list[int]]
    openers: dict[bytes, list[int]]
    spellings: dict[bytes, int]

    @classmethod
    def of(cls, marks: ThoughtMarks, pieces: Sequence[bytes], eos: Iterable[int]) -> Marks:
        opening, closing = (
            tuple(mark.encode() for mark in side) for side in (marks.opening, marks.closing)
        )
        ends = frozenset(eos)
        bits = (1 << len(pieces)) - 1
        for token in ends:
            bits &= ~(1 << token)
        free = bits.to_bytes(-(-len(pieces) // 8), "little")
        closers, openers = _closers(closing, pieces), _openers(opening, pieces)
        spellings = _spellings(closing, pieces)
        return cls(opening, closing, pieces, ends, free, closers, openers, spellings)


def _closers(marks: Sequence[bytes], pieces: Sequence[bytes]) -> dict[bytes, list[int]]:
    rests = {(mark[:at], mark[at:]) for mark in marks for at in range(len(mark))}
    found: dict[bytes, list[int]] = {}
    for token, piece in enumerate(pieces):
        for before, rest in rests:
            at = piece.find(rest)
            if at >= 0 and len(piece) > len(rest) and (at == 0 or not before):
                found.setdefault(before, []).append(token)
    return found


def _openers(marks: Sequence[bytes], pieces: Sequence[bytes]) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for token, piece in enumerate(pieces):
        for mark in marks if piece else ():
            for at in range(len(mark)):
                if piece.startswith(mark[at:]) or mark.startswith(piece, at):
                    found.setdefault(mark[:at], []).append(token)
    return found


def _spellings(marks: Sequence[bytes], pieces: Sequence[bytes]) -> dict[bytes, int]:
    rests = {mark[at:] for mark in marks for at in range(len(mark))}
    firsts, found = {rest[0] for rest in rests}, dict[bytes, int]()
    for token, piece in enumerate(pieces):
        if piece and piece[0] in firsts:
            for rest in rests:
                known = found.get(rest)
                is_longest = known is None or len(piece) > len(pieces[known])
                if is_longest and rest.startswith(piece):
                    found[rest] = token
    return found
