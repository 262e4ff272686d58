"""What a GBNF grammar consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.text.token_pieces import TokenNames

LAST_CODE_POINT = 0x10FFFF
_NO_CHARACTERS = (0, 0), (0xD800, 0xDFFF)
"""NUL, at which llama.cpp's texts end, and surrogates."""

Ranges = tuple[tuple[int, int], ...]
"""First and last of each."""


@dataclass(frozen=True)
class Characters:
    """One character of these code points."""

    ranges: Ranges

    @classmethod
    def among(cls, ranges: Sequence[tuple[int, int]], *, inverted: bool = False) -> Characters:
        """Those of the ranges, or all others, as far as they are characters of a text."""
        excluded = list(ranges) if inverted else list(_others(ranges, LAST_CODE_POINT))
        return cls(tuple(_others([*excluded, *_NO_CHARACTERS], LAST_CODE_POINT)))


@dataclass(frozen=True)
class Run(Characters):
    """As many of these characters as there are, but at least and at most so many."""

    least: int = 1
    most: int | None = None


@dataclass(frozen=True)
class Token:
    """One token of these ids, whatever its text is."""

    ranges: Ranges

    @classmethod
    def of(cls, token_id: int, names: TokenNames, *, inverted: bool = False) -> Token:
        """This one, or any other. As in llama.cpp none that ends a text is among them."""
        if inverted:
            excluded = [(each, each) for each in {token_id, *names.ends}]
            return cls(tuple(_others(excluded, names.size - 1)))
        is_known = token_id < names.size and token_id not in names.ends
        return cls(((token_id, token_id),) if is_known else ())


@dataclass(frozen=True)
class Reference:
    """What the rule or the repetition of this number matches."""

    number: int


Element = Characters | Token | Reference


@dataclass(frozen=True)
class Repetition:
    """A sequence at least, and unless ``most`` is None at most, so many times."""

    items: Sequence[Element]
    least: int
    most: int | None


Body = Sequence[Sequence[Element]] | Repetition
"""The alternatives of a rule or of a group, or a repetition."""


@dataclass
class Rules:
    """A grammar.

    Attributes:
        bodies: by number; a repetition's is higher than those of the repetitions in it.
        root: number of the rule that matches the whole text.
    """

    bodies: dict[int, Body] = field(default_factory=dict)
    root: int = 0


def sequences(body: Body) -> Sequence[Sequence[Element]]:
    """What a body may begin with, each as a whole."""
    return [body.items] if isinstance(body, Repetition) else body


def without_dead_ends(bodies: Mapping[int, Body]) -> dict[int, Body]:
    """The same without sequences that need a character or a token that never comes."""
    alive = {number: dict(enumerate(sequences(body))) for number, body in bodies.items()}
    users: dict[int, list[tuple[int, int]]] = {}
    dead: list[tuple[int, int]] = []
    for number, found in alive.items():
        for index, sequence in found.items():
            for item in sequence:
                if isinstance(item, Reference):
                    users.setdefault(item.number, []).append((number, index))
                elif not item.ranges:
                    dead.append((number, index))
    while dead:
        number, index = dead.pop()
        was_alive = alive[number].pop(index, None) is not None
        if was_alive and not alive[number] and not _is_optional(bodies[number]):
            dead += users.get(number, [])
    kept = {
        number: _left_of(bodies[number], list(found.values())) for number, found in alive.items()
    }
    return {number: body for number, body in kept.items() if body is not None}


def _left_of(body: Body, alive: Sequence[Sequence[Element]]) -> Body | None:
    if len(alive) == len(sequences(body)):
        return body
    return alive or ([[]] if _is_optional(body) else None)


def _is_optional(body: Body) -> bool:
    return isinstance(body, Repetition) and body.least == 0


def _others(ranges: Sequence[tuple[int, int]], last: int) -> Iterator[tuple[int, int]]:
    """What is in none of the ranges, from 0 to the last."""
    begin = 0
    for first, end in sorted(ranges):
        if first > end:
            continue
        if begin < first:
            yield begin, min(first - 1, last)
        begin = max(begin, end + 1)
        if begin > last:
            return
    yield begin, last
