"""Rules of GBNF in Lark, as the compiler reads them.

The compiler cuts a text into *lexemes*, the longest that can be, before rules see it: a rule such
as ``[a-z]+`` would take all letters, also those that a later rule needs. So a lexeme here is one
character or one token, and which rule takes it is left to the rules, as in llama.cpp. Longer ones
are only the runs of :mod:`paceline.structured.gbnf.runs`, and whole texts where the grammar is a
regular expression (:mod:`paceline.structured.gbnf.expressions`).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import RequestError
from paceline.structured.gbnf.expressions import class_of, counts, run_of, whole_expression
from paceline.structured.gbnf.rules import (
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
from paceline.structured.gbnf.runs import with_runs


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
    expression = whole_expression(alive, rules.root) if is_whole else None
    if expression is not None:
        return f"%llguidance {{}}\nstart: rule_{rules.root}\nrule_{rules.root}: /{expression}/\n"
    bodies = with_runs(alive, rules.root, is_whole=is_whole)
    lines = [f"rule_{number}: {_body(body)}" for number, body in bodies.items()]
    return "\n".join(["%llguidance {}", f"start: rule_{rules.root}", *lines]) + "\n"


def _body(body: Body) -> str:
    if isinstance(body, Repetition):
        return f"({_sequence(body.items)}){counts(body.least, body.most)}"
    return " | ".join(dict.fromkeys(map(_sequence, body)))


def _sequence(items: Sequence[Element]) -> str:
    return " ".join(map(_element, items)) or '""'


def _element(item: Element) -> str:
    match item:
        case Reference():
            return f"rule_{item.number}"
        case Token():
            spans = (f"{first}-{last}" for first, last in item.ranges)
            return f"<[{','.join(spans)}]>"
        case Run():
            return f"/{run_of(item)}/"
        case Characters():
            return f"/{class_of(item.ranges)}/"
