"""What a schema says of a value when references, ``allOf`` and choices are followed.

Owns the way from a schema to the types, the values and the properties that it allows. What it tells
is never narrower than the schema, and what it does not tell is named.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ShapeError
from paceline.json_schema.keywords import (
    KINDS,
    NARROWING,
    combined,
    elements,
    enumerated,
    kind_of,
    kinds,
    mapping,
    parts,
    reached,
    required,
)
from paceline.json_schema.references import References

CHOICES = ("anyOf", "oneOf")
NOTHING: Mapping[str, Any] = {"enum": []}
"""No value matches it."""
MOST_JOINED = 64
"""Schemas that hold together for a value and are gone through, and references in a row."""
MOST_STEPS = 200_000
"""Schemas, values and properties that are gone through for one document: about a second of work."""
_MOST_BRANCHES = 256
_DEEPEST = 8
"""Choices within choices that are followed."""


@dataclass(frozen=True, slots=True)
class Members:
    """The properties that an object may have.

    Attributes:
        named: the schema of each that is named, in the order in which they are.
        required: names of those that have to be there.
        others: the schema of those that are not named.
        unenforced: keywords that say more than this.
    """

    named: Mapping[str, Any]
    required: frozenset[str]
    others: Any
    unenforced: frozenset[str]

    @property
    def takes_others(self) -> bool:
        """Whether none is named, but any may be there."""
        return not self.named and self.others is not False


class Resolver:
    """One document. It must not change meanwhile.

    Each of its methods raises a ShapeError where going through the document takes too many steps.
    """

    def __init__(self, root: Any) -> None:
        self._references = References(root)
        self._kinds: dict[int, frozenset[str]] = {}
        self._conjuncts: dict[int, list[Mapping[str, Any]]] = {}
        self._direct: dict[str, set[str]] = {}
        self._room = MOST_STEPS

    def _spend(self, count: int) -> None:
        self._room -= count
        if self._room < 0:
            raise ShapeError(
                "json",
                "cannot be used",
                f"written out with its references it has more than {MOST_STEPS:,} schemas, values "
                "and properties; refer to large definitions from fewer places, or make them "
                "smaller",
            )

    def conjuncts(self, schema: Any) -> list[Mapping[str, Any]]:
        """The schemas, at most :data:`MOST_JOINED`, without references and ``allOf``, all of which
        a value has to match.
        """
        self._spend(1)
        if id(schema) in self._conjuncts:
            return self._conjuncts[id(schema)]
        conjuncts: list[Mapping[str, Any]] = [
            {key: node[key] for key in node if key not in ("$ref", "allOf")}
            for node in joined(schema, self._references)
        ]
        self._spend(len(conjuncts))
        if self._references.holds(schema):
            self._conjuncts[id(schema)] = conjuncts
        return conjuncts

    def place(self, schema: Any) -> int:
        """What tells the schema behind references from the others of the document."""
        return id(self._references.behind(schema))

    def kinds(self, schema: Any, depth: int = _DEEPEST) -> frozenset[str]:
        """Types of the values that may match."""
        known = self._kinds.get(id(schema))
        if known is not None or not depth:
            return KINDS if known is None else known
        allowed = KINDS
        for node in self.conjuncts(schema):
            allowed &= kinds(node)
            values = enumerated(node)
            if values is not None:
                self._spend(len(values))
                allowed &= frozenset(map(kind_of, values))
            for branches in _choices(node):
                self._spend(len(branches))
                allowed &= frozenset().union(*(self.kinds(each, depth - 1) for each in branches))
        if self._references.holds(schema):
            self._kinds[id(schema)] = allowed
        return allowed

    def values(self, schema: Any) -> list[Any] | None:
        """The values of the right types that alone may match; None where the schema lists none."""
        listed: list[Any] | None = None
        for node in self.conjuncts(schema):
            values = enumerated(node)
            if values is not None:
                self._spend(len(values))
                listed = values if listed is None else _in_both(listed, values)
        allowed = KINDS.intersection(*map(kinds, self.conjuncts(schema)))
        return listed and [each for each in listed if kind_of(each) in allowed]

    def narrowing(self, schema: Any) -> frozenset[str]:
        """All keywords that narrow a value, of whatever type it is."""
        keywords = set[str]()
        for count, node in enumerate(reached([schema], self._together)):
            self._spend(1)
            if count == _MOST_BRANCHES:
                return frozenset(NARROWING)
            keywords |= NARROWING & node.keys()
        return frozenset(keywords)

    def _together(self, schema: Mapping[str, Any]) -> list[Any]:
        """What describes the same values as a schema, directly."""
        return [*combined(schema), self._references.target(schema)]

    def members(self, schema: Any) -> Members:
        """The properties of the objects that match a schema."""
        return self._members(schema, set(), _DEEPEST)

    def _members(self, schema: Any, seen: set[int], depth: int) -> Members:
        nodes = [
            _Object(each, list(self._member_choices(each, seen, depth)))
            for each in self.conjuncts(schema)
        ]
        names = dict.fromkeys(name for node in nodes for name in node.named)
        needed = frozenset(name for node in nodes for name in required(node.schema))
        names |= dict.fromkeys(sorted(needed - names.keys()))
        self._spend(len(names) * len(nodes))
        named = {name: _all_of(node.of_name(name) for node in nodes) for name in names}
        possible = {n: each for n, each in named.items() if n in needed or self.kinds(each)}
        others = _all_of(node.others for node in nodes)
        members = Members(possible, needed, others if self.kinds(others) else False, frozenset())
        left = frozenset().union(*(node.unenforced(members) for node in nodes))
        return Members(members.named, needed, members.others, left)

    def _member_choices(
        self, node: Mapping[str, Any], seen: set[int], depth: int
    ) -> Iterator[dict[str, Any]]:
        """For each choice of a schema, the properties that its branches name."""
        for branches in _choices(node) if depth else ():
            schemas_of: dict[str, list[Any]] = {}
            for branch in branches:
                if id(branch) not in seen:
                    seen.add(id(branch))
                    for name, each in self._members(branch, seen, depth - 1).named.items():
                        schemas_of.setdefault(name, []).append(each)
            yield {name: _any_of(schemas) for name, schemas in schemas_of.items()}

    def definitions(self, schema: Any) -> dict[str, Any]:
        """The definitions that plain references in a schema lead to, directly or not."""
        known = mapping(self._references.root, "$defs")
        definitions, waiting = dict[str, Any](), [*self.named_in(schema)]
        while waiting:
            name = waiting.pop()
            if name in definitions:
                continue
            definitions[name] = known[name]
            self._spend(1)
            if name not in self._direct:
                self._direct[name] = self.named_in(known[name])
            waiting += self._direct[name]
        return definitions

    def named_in(self, schema: Any) -> set[str]:
        """Names of the definitions that plain references in a schema lead to directly."""
        root = self._references.root
        known = mapping(root, "$defs") if isinstance(root, Mapping) else {}
        references = (str(node.get("$ref", "")) for node in reached([schema], parts))
        return {each.removeprefix("#/$defs/") for each in references} & known.keys()


@dataclass(frozen=True, slots=True)
class _Object:
    schema: Mapping[str, Any]
    choices: list[dict[str, Any]]

    @property
    def named(self) -> dict[str, Any]:
        return functools.reduce(
            lambda named, more: {**named, **more}, self.choices, {**self._properties}
        )

    @property
    def _properties(self) -> Mapping[str, Any]:
        return mapping(self.schema, "properties")

    @property
    def others(self) -> Any:
        """The schema of properties that are not named; of some a pattern may say more."""
        has_patterns = bool(mapping(self.schema, "patternProperties"))
        return True if has_patterns else self.schema.get("additionalProperties", True)

    def of_name(self, name: str) -> Any:
        own = self._properties.get(name, self.others)
        return _all_of([own, *(each[name] for each in self.choices if name in each)])

    def unenforced(self, members: Members) -> Iterator[str]:
        schema = self.schema
        yield from {*CHOICES, "enum", "const"} & schema.keys()
        if mapping(schema, "patternProperties"):
            yield "patternProperties"
            if schema.get("additionalProperties", True) is not True:
                yield "additionalProperties"
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        if isinstance(least, int) and least > len(members.required):
            yield "minProperties"
        if isinstance(most, int) and (members.takes_others or most < len(members.named)):
            yield "maxProperties"


def joined(schema: Any, references: References, most: int = MOST_JOINED) -> list[Mapping[str, Any]]:
    """A schema and what ``allOf`` and references in it say of the same value, up to a number."""
    schemas, seen, waiting = list[Mapping[str, Any]](), set[int](), deque([schema])
    while waiting and len(schemas) < most:
        node = waiting.popleft()
        if node is False:
            node = NOTHING
        if isinstance(node, Mapping) and id(node) not in seen:
            seen.add(id(node))
            schemas.append(node)
            waiting += [references.target(node), *elements(node, "allOf")]
    return schemas


def _in_both(values: list[Any], others: list[Any]) -> list[Any]:
    """The values of one list that the other has as well; 1.0 is 1, and true is not."""
    known = set(map(_identity, others))
    return [each for each in values if _identity(each) in known]


def _identity(value: Any) -> tuple[str, Any]:
    is_plain = not isinstance(value, Mapping | list)
    return kind_of(value), value if is_plain else json.dumps(value, sort_keys=True)


def _choices(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    yield from (schema[key] for key in CHOICES if isinstance(schema.get(key), list))


def _all_of(schemas: Any) -> Any:
    telling = [each for each in schemas if each is not True and each != {}]
    if any(each is False for each in telling):
        return False
    return telling[0] if len(telling) == 1 else {"allOf": telling} if telling else {}


def _any_of(schemas: list[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
