"""Rules of GBNF as regular expressions, in the compiler's syntax.

A grammar in which no rule leads back to itself is one expression. Read by rules, a text such as
``[a-z]+ .* "."`` may stand at as many places as it has characters, each of which costs time for
each token of the vocabulary; an automaton is in one state, however many places that means.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.structured.gbnf.rules import (
    Body,
    Characters,
    Element,
    Ranges,
    Reference,
    Repetition,
    Run,
    sequences,
)

MAX_SIZE = 1000
"""Characters and references in an expression, those of a rule wherever it is referred to."""
MAX_DEPTH = 50


def whole_expression(bodies: Mapping[int, Body], root: int) -> str | None:
    """All of a grammar; None where it is recursive, names tokens, or is too large."""
    try:
        return _Expression(bodies).of(root, frozenset())
    except _NotRegularError:
        return None


def class_of(ranges: Ranges) -> str:
    """One character of these."""
    spans = (
        _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}"
        for first, last in ranges
    )
    return f"[{''.join(spans)}]"


def run_of(run: Run) -> str:
    return class_of(run.ranges) + counts(run.least, run.most)


def counts(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _escaped(code: int) -> str:
    return f"\\x{{{code:x}}}"


class _NotRegularError(Exception):
    """The grammar is no expression."""


class _Expression:
    def __init__(self, bodies: Mapping[int, Body]) -> None:
        self._bodies = bodies
        self._size = 0

    def of(self, number: int, within: frozenset[int]) -> str:
        """
        Args:
            within: the numbers of the bodies in which this one is.
        """
        if number in within or len(within) == MAX_DEPTH:
            raise _NotRegularError
        body, within = self._bodies[number], within | {number}
        found = ["".join(self._item(item, within) for item in line) for line in sequences(body)]
        whole = f"({'|'.join(dict.fromkeys(found))})"
        return whole + counts(body.least, body.most) if isinstance(body, Repetition) else whole

    def _item(self, item: Element, within: frozenset[int]) -> str:
        self._size += 1
        if self._size > MAX_SIZE:
            raise _NotRegularError
        match item:
            case Reference():
                return self.of(item.number, within)
            case Characters():
                return class_of(item.ranges)
        raise _NotRegularError
