"""Strings that calls write as they are, without quotation marks: what of a schema holds for them.

Owns the way from keywords of a schema to expressions that match a whole text. Knows no format of a
model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.json_schema.keywords import elements, enumerated
from paceline.json_schema.resolver import CHOICES, Resolver
from paceline.server.chat.calls.kind import Schema
from paceline.server.chat.calls.parameters import Parameter

_ANYTHING = r"(?:.|\n)*"
_DEEPEST = 8
"""Choices within choices that are followed."""
_MOST_BRANCHES = 256
_LONGEST = 1000
"""Largest length that is counted: the grammar has a state for each character."""
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
"""An escape, a class, or a character. A class without its end goes on to the last character."""
_DATE = r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_MINUTES = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTES}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_MINUTES})"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"[\w+-]+(?:\.[\w+-]+)*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}


@dataclass(frozen=True, slots=True)
class TextRules:
    """
    Attributes:
        patterns: expressions, each of which matches the whole text.
        unenforced: keywords that they leave out.
    """

    patterns: tuple[str, ...] = ()
    unenforced: frozenset[str] = frozenset()


def text_rules(each: Parameter) -> TextRules:
    """What holds for a value that is a string."""
    return _Texts(each.resolver).rules(each.schema, _DEEPEST)


class _Texts:
    """What one schema says of strings; ``_room`` is how many branches of choices are followed."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._room = _MOST_BRANCHES

    def rules(self, schema: Any, depth: int) -> TextRules:
        return _all_of(
            part for node in self._resolver.conjuncts(schema) for part in self._parts(node, depth)
        )

    def _parts(self, node: Schema, depth: int) -> Iterator[TextRules]:
        yield from (_enumerated(node), _matched(node), _measured(node), _formatted(node))
        for key in CHOICES:
            branches = elements(node, key)
            self._room -= len(branches)
            if branches and (not depth or self._room < 0):
                yield TextRules((), frozenset({key}))
            elif branches:
                texts = [each for each in branches if "string" in self._resolver.kinds(each)]
                yield _either(key, [self.rules(each, depth - 1) for each in texts])


def _all_of(rules: Iterable[TextRules]) -> TextRules:
    found = list(rules)
    return TextRules(
        tuple(pattern for each in found for pattern in each.patterns),
        frozenset().union(*(each.unenforced for each in found)),
    )


def _either(key: str, parts: list[TextRules]) -> TextRules:
    if not parts:  # no text matches, which is for the types to say
        return TextRules((), frozenset({key}))
    if not all(each.patterns for each in parts):  # one of them takes any text
        return TextRules((), frozenset().union(*(each.unenforced for each in parts)))
    if len(parts) == 1:
        return parts[0]
    if any(len(each.patterns) > 1 or each.unenforced for each in parts):
        return TextRules((), frozenset({key}))
    return TextRules((_one_of(each.patterns[0] for each in parts),))


def _one_of(patterns: Iterable[str]) -> str:
    return "|".join(f"(?:{each})" for each in patterns)


def _enumerated(schema: Schema) -> TextRules:
    values = enumerated(schema)
    if values is None:
        return TextRules()
    return TextRules((_one_of(map(_literal, filter(lambda v: isinstance(v, str), values))),))


def _literal(text: str) -> str:
    return re.escape(text).replace("\\\n", "\\n")


def _matched(schema: Schema) -> TextRules:
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return TextRules()
    whole = whole_match(pattern)
    return TextRules((), frozenset({"pattern"})) if whole is None else TextRules((whole,))


def _measured(schema: Schema) -> TextRules:
    numbers = {key: _count(schema.get(key)) for key in ("minLength", "maxLength")}
    left = frozenset(key for key, number in numbers.items() if (number or 0) > _LONGEST)
    least, most = (None if key in left else number for key, number in numbers.items())
    if not least and most is None:
        return TextRules((), left)
    return TextRules((rf"[\s\S]{{{least or 0},{'' if most is None else most}}}",), left)


def _count(number: Any) -> int | None:
    is_count = isinstance(number, int | float) and not isinstance(number, bool)
    return int(number) if is_count and number == number // 1 else None


def _formatted(schema: Schema) -> TextRules:
    name = schema.get("format")
    if not isinstance(name, str) or name == "unknown":
        return TextRules()
    found = _FORMATS.get(name)
    return TextRules((), frozenset({"format"})) if found is None else TextRules((found,))


def whole_match(pattern: str) -> str | None:
    """What matches the whole of each text in which a pattern is found; None if that is not plain.

    >>> whole_match("^a|b$")
    '(?:a)(?:.|\\\\n)*|(?:.|\\\\n)*(?:b)'
    """
    parts: list[list[str]] = [[]]
    depth = 0
    for token in _TOKENS.findall(pattern):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == "|" and not depth:
            parts.append([])
        else:
            parts[-1].append(token)
    found = [_whole_part(part) for part in parts]
    return None if None in found else "|".join(filter(None, found))


def _whole_part(tokens: list[str]) -> str | None:
    begin, end = _ANYTHING, _ANYTHING
    if tokens[:1] == ["^"]:
        begin, tokens = "", tokens[1:]
    if tokens[-1:] == ["$"]:
        end, tokens = "", tokens[:-1]
    if "^" in tokens or "$" in tokens:
        return None
    return f"{begin}(?:{''.join(tokens)}){end}"
