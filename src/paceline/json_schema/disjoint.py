"""Which schemas exclude each other, so that no value matches two of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.json_schema.keywords import enumerated, kinds, mapping, required
from paceline.json_schema.references import References

MOST_COMPARED = 64
"""Schemas that are compared with each other, and values and properties that tell them apart: so
that a schema made to be slow is not."""


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


def are_disjoint(schemas: list[Any], references: References) -> bool:
    """Whether it is plain that no value matches two of the schemas."""
    if len(schemas) > MOST_COMPARED:
        return False
    pairs = itertools.combinations([_traits(each, references) for each in schemas], 2)
    return all(one.excludes(other) for one, other in pairs)


def _traits(schema: Any, references: References) -> _Traits:
    node = _behind(schema, references)
    properties, marks = mapping(node, "properties"), {}
    for name in required(node)[:MOST_COMPARED]:
        values = _values(_behind(properties.get(name), references))
        if values is not None:
            marks[name] = values
    return _Traits(kinds(node), _values(node), marks)


def _behind(schema: Any, references: References) -> Mapping[str, Any]:
    found = references.behind(schema)
    return found if isinstance(found, Mapping) else {}


def _values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    values = enumerated(schema)
    if values is None or len(values) > MOST_COMPARED:
        return None
    return frozenset(json.dumps(each, sort_keys=True) for each in values)
