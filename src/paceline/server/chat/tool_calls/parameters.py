"""What the schema of a tool says of single parameters, for formats that write them one by one.

Owns the way from a written value to JSON, and from a schema to expressions that match the whole of
a text without quotation marks. What is malformed in a caller's schema counts as not there. Knows no
format of a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import RequestError
from paceline.json_schema.keywords import KINDS, elements, enumerated, kind_of
from paceline.json_schema.resolver import CHOICES, Members, Resolver
from paceline.server.chat.tool_calls.format import Schema
from paceline.server.chat.tool_calls.values import MalformedError, json_of_literal

STRING = frozenset({"string"})
_TYPES = {"fraction": "number"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter; ``schema`` is an object or a truth value, of the resolver's document."""

    key: str
    schema: Any
    resolver: Resolver
    is_required: bool = False

    @property
    def kinds(self) -> frozenset[str]:
        """Types of the values that it may have; none where no value is allowed."""
        return self.resolver.kinds(self.schema)

    @property
    def narrowing(self) -> frozenset[str]:
        """Keywords that say more of its values than their type, in any branch."""
        return self.resolver.narrowing(self.schema)

    @property
    def values(self) -> list[Any] | None:
        """The values that it alone may have; None where these are not plainly listed."""
        values = self.resolver.values(self.schema)
        is_plain = values and not any(isinstance(each, list | dict) for each in values)
        others = self.narrowing - {"enum", "const"}
        return values if is_plain and not others and not self._has_choices else None

    @property
    def _has_choices(self) -> bool:
        nodes = self.resolver.conjuncts(self.schema)
        return any("anyOf" in node or "oneOf" in node for node in nodes)

    @property
    def without_strings(self) -> Schema:
        """The schema of those values that are no strings."""
        names = {_TYPES.get(each, each) for each in self.kinds - STRING}
        return {**self.whole, "type": sorted(names)}

    def by_type(self) -> dict[str, Schema]:
        """The same by the type that JSON calls them."""
        names = {_TYPES.get(each, each) for each in self.kinds - STRING}
        names -= {"integer"} if "number" in names else set()
        json_names = {name: "number" if name == "integer" else name for name in sorted(names)}
        return {json_names[name]: {**self.whole, "type": name} for name in json_names}

    @property
    def whole(self) -> Schema:
        """The schema as a document of its own."""
        if not isinstance(self.schema, Mapping):
            return {} if self.schema else {"enum": []}
        definitions = self.resolver.definitions(self.schema)
        return {**self.schema, "$defs": definitions} if definitions else self.schema

    def items(self) -> Parameter:
        """What the elements of its lists have to be."""
        nodes = self.resolver.conjuncts(self.schema)
        schemas = [node["items"] for node in nodes if "items" in node]
        return Parameter(
            "", {"allOf": schemas} if len(schemas) > 1 else (*schemas, {})[0], self.resolver
        )

    def members(self) -> Members:
        """The properties of its objects."""
        return self.resolver.members(self.schema)

    def as_json(self, text: str) -> str:
        """A value that is written without quotation marks, as JSON of a type that is allowed."""
        for value in self.values or ():
            if text == bare(value):
                return json.dumps(value, ensure_ascii=False)
        allowed = self.kinds or KINDS
        value_json = None if allowed == STRING else _json_of(text.strip())
        if value_json is not None and (
            kind_of(json.loads(value_json)) in allowed or "string" not in allowed
        ):
            return value_json
        return json.dumps(text, ensure_ascii=False)


def bare(value: Any) -> str:
    """A value as it is written without quotation marks."""
    return value if isinstance(value, str) else json.dumps(value)


def parameters(members: Members, resolver: Resolver) -> list[Parameter] | None:
    """The parameters that an object names; None where it names none and allows any."""
    if members.takes_others:
        return None
    needed = members.required
    return [Parameter(n, each, resolver, n in needed) for n, each in members.named.items()]


def parameter(schema: Schema, key: str) -> Parameter:
    """One by its name; anything goes where the schema does not say what, or too much."""
    resolver = Resolver(schema)
    try:
        members = resolver.members(schema)
    except RequestError:  # it did not have to hold, or it would have been refused
        return Parameter(key, {}, Resolver({}))
    others = {} if members.others is False else members.others
    return Parameter(key, members.named.get(key, others), resolver)


def _json_of(text: str) -> str | None:
    """A value that is no string, as JSON; Python's spelling of it is understood too."""
    try:
        json.loads(text, parse_constant=_refuse)
        return None if text.startswith('"') else text
    except (ValueError, RecursionError):
        pass
    try:
        value_json = json_of_literal(text)
        return None if value_json.startswith('"') else value_json
    except MalformedError:
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


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
    """Expressions, each of which matches the whole text, and the keywords that they leave out."""

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
    listed = list(rules)
    return TextRules(
        tuple(pattern for each in listed for pattern in each.patterns),
        frozenset().union(*(each.unenforced for each in listed)),
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
    pattern = _FORMATS.get(name)
    return TextRules((), frozenset({"format"})) if pattern is None else TextRules((pattern,))


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
    whole_parts = [_whole_part(part) for part in parts]
    return None if None in whole_parts else "|".join(filter(None, whole_parts))


def _whole_part(tokens: list[str]) -> str | None:
    begin, end = _ANYTHING, _ANYTHING
    if tokens[:1] == ["^"]:
        begin, tokens = "", tokens[1:]
    if tokens[-1:] == ["$"]:
        end, tokens = "", tokens[:-1]
    if "^" in tokens or "$" in tokens:
        return None
    return f"{begin}(?:{''.join(tokens)}){end}"
