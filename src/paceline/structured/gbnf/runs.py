"""Repeated characters that may be one lexeme each: for speed, without a change of what matches.

The compiler takes the longest lexeme. A run of characters is the only way to read a text where
neither what may stand in its place nor what is behind it goes on with one of these characters
(:mod:`paceline.structured.gbnf.follow`). So a JSON string is few lexemes, whose masks the compiler
knows beforehand, and not as many as it has characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.structured.gbnf.follow import Follow
from paceline.structured.gbnf.rules import (
    Body,
    Characters,
    Element,
    Reference,
    Repetition,
    Run,
    Token,
    sequences,
)

MAX_SIZE = 1000
"""Rules, and what they consist of, in a grammar in which runs are looked for."""
MAX_UNROLLED = 8
_ROUNDS = 4
"""Rules that are one character are looked through so deep."""


def with_runs(bodies: Mapping[int, Body], root: int, *, is_whole: bool) -> Mapping[int, Body]:
    """The same grammar, with runs where these are safe.

    Args:
        is_whole: nothing is behind what the grammar matches.
    """
    lines = [each for body in bodies.values() for each in sequences(body)]
    names_tokens = any(isinstance(item, Token) for line in lines for item in line)
    if names_tokens or sum(len(line) + 1 for line in lines) > MAX_SIZE:
        return bodies
    plain = _without_names_of_characters(bodies)
    found, loops = _with_all_runs(plain)
    follow = Follow(found, root, loops)
    return {
        number: _without_runs(number, body, plain)
        if _begins_with_run(body) and not follow.is_certain(number, may_be_last=is_whole)
        else body
        for number, body in found.items()
    }


def _begins_with_run(body: Body) -> bool:
    return any(isinstance(item, Run) for item in sequences(body)[0])


def _without_names_of_characters(bodies: Mapping[int, Body]) -> Mapping[int, Body]:
    """References to what is one character become the character."""
    for _ in range(_ROUNDS):
        single = {number: _one_character(body) for number, body in bodies.items()}
        bodies = {number: _with_characters(body, single) for number, body in bodies.items()}
    return bodies


def _one_character(body: Body) -> Characters | None:
    if isinstance(body, Repetition):
        return None
    character, others = _parted(body)
    return None if others else character


def _parted(
    alternatives: Sequence[Sequence[Element]],
) -> tuple[Characters | None, list[Sequence[Element]]]:
    """All alternatives that are one character as one, and the others."""
    ranges: list[tuple[int, int]] = []
    others: list[Sequence[Element]] = []
    for sequence in alternatives:
        if len(sequence) == 1 and isinstance(sequence[0], Characters):
            ranges += sequence[0].ranges
        else:
            others.append(sequence)
    return Characters.among(ranges) if ranges else None, others


def _with_characters(body: Body, single: Mapping[int, Characters | None]) -> Body:
    def put(items: Sequence[Element]) -> list[Element]:
        return [(isinstance(item, Reference) and single[item.number]) or item for item in items]

    if not isinstance(body, Repetition):
        return [put(sequence) for sequence in body]
    if body.least == body.most and body.least <= MAX_UNROLLED:
        return [put(body.items) * body.least]  # so that its last character is known from the others
    return Repetition(put(body.items), body.least, body.most)


def _with_all_runs(bodies: Mapping[int, Body]) -> tuple[dict[int, Body], frozenset[int]]:
    """With a run wherever characters are repeated.

    Returns:
        And the numbers of the repetitions that begin again behind a run only with another thing.
    """
    found = dict(bodies)
    loops = set()
    for number, body in bodies.items():
        if not isinstance(body, Repetition) or body.most == 1 or len(body.items) != 1:
            continue
        item = body.items[0]
        if isinstance(item, Characters):
            nothing: list[list[Element]] = [] if body.least else [[]]
            found[number] = [[Run(item.ranges, body.least or 1, body.most)], *nothing]
        elif isinstance(item, Reference) and body.least <= 1 and body.most is None:
            inner = bodies[item.number]
            character, others = (None, []) if isinstance(inner, Repetition) else _parted(inner)
            if character is not None:
                own = max(found) + 1  # since others may refer to the rule, too
                found[own] = [[Run(character.ranges)], *others]
                found[number] = Repetition([Reference(own)], body.least, None)
                loops.add(number)
    return found, frozenset(loops)


def _without_runs(number: int, body: Body, bodies: Mapping[int, Body]) -> Body:
    if number in bodies:
        return bodies[number]
    return [
        [Characters(item.ranges) if isinstance(item, Run) else item for item in sequence]
        for sequence in sequences(body)
    ]
