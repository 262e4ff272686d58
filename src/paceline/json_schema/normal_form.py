"""The form of a schema that everything which compiles or reads one starts from.

References are plain, words of other dialects become those of JSON Schema, and objects that name
properties have no others, unless the schema says otherwise: hardly anyone who asks a model for an
object wants further ones. llama.cpp's converter (b11549) and xgrammar (0.2.9, by its default
``strict_mode``) close such objects too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.json_schema.keywords import (
    COMBINERS,
    elements,
    mapping,
    parts,
    reached,
    required,
    with_parts,
)
from paceline.json_schema.references import References, with_plain_references


def normal_form(schema: Any) -> Any:
    """A schema with plain references and closed objects, in the words of JSON Schema alone.

    The normal form of a normal form is itself, but for definitions that nothing refers to.
    """
    steps = with_plain_references, in_plain_words, with_closed_objects
    return functools.reduce(lambda changed, step: step(changed), steps, schema)


_NARROWS = {"type", "enum", "const", "$ref", *COMBINERS}
_COUNTS = ("Length", "Items", "Properties")


def in_plain_words(schema: Any) -> Any:
    """The same schema in the words of JSON Schema alone; its root is not made null.

    That is without ``nullable`` of OpenAPI 3.0, which allows null beside what the schema describes,
    and counts with a decimal point, which JSON does not tell from those without.

    >>> in_plain_words({"items": {"type": "string", "nullable": True, "minLength": 2.0}})
    {'items': {'type': ['string', 'null'], 'minLength': 2}}
    """
    return _plain(schema) if isinstance(schema, Mapping) else schema


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    changed = with_parts(schema, _nullable)
    for key in (f"{end}{each}" for end in ("min", "max") for each in _COUNTS):
        number = changed.get(key)
        if isinstance(number, float) and number.is_integer():
            changed[key] = int(number)
    return changed


def _nullable(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    changed = _plain(schema)
    if changed.get("nullable") is not True or not _NARROWS & changed.keys():
        return changed
    del changed["nullable"]
    types = changed.get("type")
    if isinstance(types, str) and not (_NARROWS - {"type"}) & changed.keys():
        return {**changed, "type": [types, "null"]} if types != "null" else changed
    return {"anyOf": [changed, {"type": "null"}]}


MOST_STEPS = 50_000
"""Schemas that are gone through, and names that are noted or written: so that a schema made to be
slow is not."""
DEEPEST = 64
"""Schemas within each other, references followed, that are gone into."""
_OPENING = {"patternProperties", "enum", "const"}
_ASIDES = ("not", "if", "then", "else", "propertyNames", "contains", "unevaluatedItems")
"""Keywords whose schemas are no parts of a value, or not always."""
_DEPENDENT = ("dependentSchemas", "dependentRequired", "dependencies")


class _TooLargeError(Exception):
    """More would be written than is worth it."""


def with_closed_objects(schema: Any) -> Any:
    """A schema whose objects are closed, where they name properties and do not say otherwise.

    What says otherwise is ``additionalProperties``, ``patternProperties``, a true
    ``unevaluatedProperties``, ``enum``, ``const`` or a larger ``minProperties``. Where ``allOf``, a
    reference and what stands beside it, or ``anyOf`` describe one object together, that has the
    properties which any of them names.

    Args:
        schema: with plain references.

    >>> with_closed_objects({"properties": {"a": {"type": "null"}}})
    {'properties': {'a': {'type': 'null'}}, 'additionalProperties': False}
    """
    if not isinstance(schema, Mapping):
        return schema
    try:
        return _Closing(schema).whole()
    except _TooLargeError:
        return schema


class _Closing:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._references = References(root)
        self._names: dict[int, frozenset[str]] = {}
        self._inlined = set[int]()
        self._room = MOST_STEPS
        self._depth = 0

    def whole(self) -> dict[str, Any]:
        definitions = mapping(self._root, "$defs")
        root = {key: value for key, value in self._root.items() if key != "$defs"}
        closed: dict[str, Any] = self._alone(root)
        if definitions:
            closed["$defs"] = {name: self._alone(each) for name, each in definitions.items()}
        return closed

    def _alone(self, schema: Any) -> Any:
        return self._joined(schema, frozenset(), self._says_otherwise(schema))

    def _joined(self, schema: Any, others: frozenset[str], is_open: bool) -> Any:
        """One of the schemas that describe a value together. ``others`` are names of properties
        that the rest of them allow; ``is_open`` allows any.
        """
        if not isinstance(schema, Mapping):
            return schema
        with self._deeper():
            return self._joined_object(schema, others, is_open)

    def _joined_object(
        self, schema: Mapping[str, Any], others: frozenset[str], is_open: bool
    ) -> dict[str, Any]:
        groups = self._groups(schema)
        own = _own_names(schema)
        if not own | others and len(groups) == 1 and "allOf" not in groups:
            return self._transparent(schema)
        kept = self._with_closed_parts(schema)
        names_of = {key: self._names_of_all(group) for key, group in groups.items()}
        for key, group in groups.items():
            around = others.union(own, *(names_of[each] for each in names_of if each != key))
            if key == "$ref":
                self._refer(kept, group[0], around, is_open)
            else:
                kept[key] = self._branches(key, group, around, is_open)
        return self._with_end(kept, others.union(own, *names_of.values()), is_open)

    def _transparent(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A schema that is a reference or a choice, and itself says nothing of properties."""
        kept = self._with_closed_parts(schema)
        for key in ("anyOf", "oneOf"):
            if key in kept:
                kept[key] = [self._alone(each) for each in kept[key]]
        return kept

    def _branches(
        self, key: str, branches: list[Any], around: frozenset[str], is_open: bool
    ) -> list[Any]:
        if key != "allOf":
            return [self._joined(each, around, is_open) for each in branches]
        names = [self._names_in_place(each) for each in branches]
        rest = [around.union(*names[:i], *names[i + 1 :]) for i in range(len(branches))]
        return [self._joined(*each, is_open) for each in zip(branches, rest, strict=True)]

    def _refer(
        self, kept: dict[str, Any], target: Any, around: frozenset[str], is_open: bool
    ) -> None:
        """Keep a reference that says the same when it is closed by itself; write it out if not."""
        is_same = not is_open and around <= self._names_in_place(target)
        if is_same or not self._names_in_place(target) or id(target) in self._inlined:
            return
        self._inlined.add(id(target))
        written = self._joined(target, around, is_open)
        self._inlined.discard(id(target))
        del kept["$ref"]
        kept["allOf"] = [*kept.get("allOf", ()), written]

    def _with_end(
        self, kept: dict[str, Any], names: frozenset[str], is_open: bool
    ) -> dict[str, Any]:
        self._spend(1)
        properties = kept.get("properties")
        if not isinstance(properties, Mapping) or {*_OPENING, "additionalProperties"} & kept.keys():
            return kept
        if is_open:
            return {**kept, "additionalProperties": True}
        more = sorted(names - properties.keys())
        self._spend(len(more))
        properties = {**properties, **dict.fromkeys(more, True)}
        return {**kept, "properties": properties, "additionalProperties": False}

    @contextlib.contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > DEEPEST:
            raise _TooLargeError
        yield
        self._depth -= 1

    def _spend(self, count: int) -> None:
        self._room -= count
        if self._room < 0:
            raise _TooLargeError

    def _with_closed_parts(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The schema with its parts closed that describe other values than it does."""
        self._spend(1)
        left = {key: schema[key] for key in schema if key in (*COMBINERS, *_ASIDES, *_DEPENDENT)}
        rest = {key: schema[key] for key in schema if key not in left}
        return {key: {**with_parts(rest, self._alone), **left}[key] for key in schema}

    def _groups(self, schema: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The schemas in place of which a schema stands, or of which it is one, by keyword."""
        groups = {key: elements(schema, key) for key in COMBINERS if elements(schema, key)}
        target = self._references.target(schema)
        return groups if target is None else {**groups, "$ref": [target]}

    def _names_of_all(self, schemas: list[Any]) -> frozenset[str]:
        return frozenset().union(*map(self._names_in_place, schemas))

    def _names_in_place(self, schema: Any) -> frozenset[str]:
        """Names of the properties that a schema speaks of, in any of its branches."""
        if not isinstance(schema, Mapping):
            return frozenset()
        if id(schema) not in self._names:
            self._names[id(schema)] = frozenset()  # while it leads back to itself
            groups = self._groups(schema).values()
            with self._deeper():
                names = _own_names(schema).union(*map(self._names_of_all, groups))
            self._spend(len(names))
            self._names[id(schema)] = names
        return self._names[id(schema)]

    def _says_otherwise(self, schema: Any) -> bool:
        names = self._names_in_place(schema)
        return any(_is_open(each, len(names)) for each in self._in_place(schema))

    def _in_place(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        for node in reached([schema], lambda n: itertools.chain(*self._groups(n).values())):
            self._spend(1)
            yield node


def _is_open(schema: Mapping[str, Any], count: int) -> bool:
    """Whether a schema says that an object may have more than so many named properties."""
    least = schema.get("minProperties")
    return (
        bool(_OPENING & schema.keys())
        or schema.get("additionalProperties", False) is not False
        or schema.get("unevaluatedProperties", False) is not False
        or (isinstance(least, int) and least > count)
    )


def _own_names(schema: Mapping[str, Any]) -> frozenset[str]:
    """Names that a schema itself speaks of, conditions included."""
    names = {*mapping(schema, "properties"), *required(schema)}
    for key in _ASIDES[:4]:
        names |= _names_anywhere(schema.get(key))
    for key in _DEPENDENT:
        for name, value in mapping(schema, key).items():
            listed = value if isinstance(value, list) else []
            names |= {name, *_names_anywhere(value)}
            names |= {each for each in listed if isinstance(each, str)}
    return frozenset(names)


def _names_anywhere(schema: Any) -> set[str]:
    """Names in a schema and in those in it, whatever they describe: rather too many than not."""
    names = set[str]()
    for node in reached([schema], parts):
        names |= {*mapping(node, "properties"), *required(node)}
    return names
