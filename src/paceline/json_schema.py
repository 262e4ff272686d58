"""JSON schemas as data: where references lead, and which schemas exclude each other.

Schemas are callers' and may be malformed: what is not as it should be counts as not there. Knows no
compiler and no request.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_NOTHING: Mapping[str, Any] = {}
MOST_COMPARED = 64
"""Schemas that are compared with each other, and values and properties that tell them apart: so
that a schema made to be slow is not."""
KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_OF_TYPE = {"number": {"integer", "fraction"}}


def endless_reference(schema: Any) -> str | None:
    """A ``$ref`` that every value has to follow again and again; None where there is none.

    >>> endless_reference({"properties": {"next": {"$ref": "#"}}, "required": ["next"]})
    '#'
    """
    if not isinstance(schema, Mapping):
        return None
    done: set[int] = set()
    path = {id(schema): ("", _needed(schema, schema))}
    while path:
        at = next(reversed(path))
        reference, node = next(path[at][1], ("", None))
        if node is None:
            done.add(at)
            del path[at]
        elif id(node) in path:
            followed = [reference, *(each for each, _ in reversed(path.values()))]
            return next(filter(None, followed), "#")
        elif id(node) not in done:
            path[id(node)] = reference, _needed(node, schema)
    return None


def _needed(schema: Mapping[str, Any], root: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What every value of a schema has to match as well, with the reference that leads there."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield reference, resolved(reference, root)
    parts = []
    for key in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and (key == "allOf" or len(branches) == 1):
            parts += branches
    properties, names = mapping(schema, "properties"), required(schema)
    parts += [each for name, each in properties.items() if name in names]
    yield from (("", each) for each in parts if isinstance(each, Mapping))


def resolved(reference: str, root: Any) -> Mapping[str, Any]:
    """The schema that a reference within the same document leads to; empty where it leads out."""
    node, parts = root, reference.split("/")
    if parts[0] != "#":
        return _NOTHING
    for part in parts[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            node = node.get(name) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else _NOTHING


@dataclass(frozen=True, slots=True)
class _Traits:
    """What tells one schema from another.

    Attributes:
        kinds: types of the values that match.
        values: those that alone match, as JSON; None where others may.
        marks: of objects, the required properties of which the values are known.
    """

    kinds: frozenset[str]
    values: frozenset[str] | None
    marks: Mapping[str, frozenset[str]]

    def excludes(self, other: _Traits) -> bool:
        """Whether it is plain that no value matches both."""
        shared = self.kinds & other.kinds
        if not shared:
            return True
        if self.values is not None and other.values is not None:
            return self.values.isdisjoint(other.values)
        return shared == {"object"} and any(
            values.isdisjoint(other.marks[name])
            for name, values in self.marks.items()
            if name in other.marks
        )


def are_disjoint(schemas: list[Any], root: Any) -> bool:
    """Whether it is plain that no value matches two of the schemas.

    Args:
        root: the document that their references lead into.
    """
    if len(schemas) > MOST_COMPARED:
        return False
    pairs = itertools.combinations([_traits(each, root) for each in schemas], 2)
    return all(one.excludes(other) for one, other in pairs)


def _traits(schema: Any, root: Any) -> _Traits:
    node = target(schema, root)
    properties, marks = mapping(node, "properties"), {}
    for name in itertools.islice(_names(node), MOST_COMPARED):
        values = _values(target(properties.get(name), root))
        if values is not None:
            marks[name] = values
    return _Traits(kinds(node), _values(node), marks)


def target(schema: Any, root: Any) -> Mapping[str, Any]:
    """The schema behind references, as far as these end; empty, so that all matches, otherwise."""
    for _ in range(MOST_COMPARED):
        if not isinstance(schema, Mapping):
            return _NOTHING
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = resolved(reference, root)
    return _NOTHING


def kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema names, or all; a number is an integer or a fraction."""
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named
    if not isinstance(types, list):
        return KINDS
    found = [_OF_TYPE.get(each, {each}) for each in types if isinstance(each, str)]
    return frozenset(itertools.chain.from_iterable(found))


def _values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or len(values) > MOST_COMPARED:
        return None
    return frozenset(json.dumps(each, sort_keys=True) for each in values)


def mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a keyword, empty where there is none."""
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def required(schema: Mapping[str, Any]) -> set[str]:
    """Names of the properties that an object must have."""
    return set(_names(schema))


def _names(schema: Mapping[str, Any]) -> list[str]:
    names = schema.get("required")
    return [each for each in names if isinstance(each, str)] if isinstance(names, list) else []
