"""Rules of GBNF in Lark, as the compiler reads them.

The compiler cuts a text into *lexemes*, the longest that can be, before rules see it: a rule such
as ``[a-z]+`` would take all letters, also those that a later rule needs. So a lexeme here is one
character or one token, and which rule takes it is left to the rules, as in llama.cpp; longer ones
are only the runs of :mod:`paceline.runtime.gbnf.runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paceline.errors import RequestError
from paceline.runtime.gbnf.rules import (
    Body,
    Characters,
    Element,
    Reference,
    Repetition,
    Rules,
    Run,
    Token,
    without_dead_ends,
)
from paceline.runtime.gbnf.runs import with_runs


def lark_of(rules: Rules, *, is_whole: bool) -> str:
    """
    Args:
        is_whole: nothing is behind what the grammar matches.

    Raises:
        RequestError: no text matches.
    """
    alive = without_dead_ends(rules.bodies)
    if rules.root not in alive:
        raise RequestError(
            "No text matches the GBNF: each needs a character or a token that cannot come"
        )
    bodies = with_runs(alive, rules.root, is_whole=is_whole)
    lines = [f"rule_{number}: {_body(body)}" for number, body in bodies.items()]
    return "\n".join(["%llguidance {}", f"start: rule_{rules.root}", *lines]) + "\n"


def _body(body: Body) -> str:
    if isinstance(body, Repetition):
        return f"({_sequence(body.items)}){_counts(body.least, body.most)}"
    return " | ".join(dict.fromkeys(map(_sequence, body)))


def _sequence(items: Sequence[Element]) -> str:
    return " ".join(map(_element, items)) or '""'


def _element(item: Element) -> str:
    match item:
        case Reference():
            return f"rule_{item.number}"
        case Token():
            return f"<[{','.join(_spans(item.ranges, str))}]>"
        case Run():
            characters = "".join(_spans(item.ranges, _escaped))
            return f"/[{characters}]{_counts(item.least, item.most)}/"
        case Characters():
            return f"/[{''.join(_spans(item.ranges, _escaped))}]/"


def _counts(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _spans(ranges: Iterable[tuple[int, int]], form: Callable[[int], str]) -> Iterable[str]:
    for first, last in ranges:
        yield form(first) if first == last else f"{form(first)}-{form(last)}"


def _escaped(code: int) -> str:
    return f"\\x{{{code:x}}}"
