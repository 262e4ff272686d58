"""Keywords of a schema, read with care; and where in a schema other schemas stand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
COMBINERS = ("allOf", "anyOf", "oneOf")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords under which each member is a schema."""
LISTS = (*COMBINERS, "prefixItems")
"""Keywords under which each element is one."""
SINGLE = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "contentSchema"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("not", "if", "then", "else"),
)
"""Keywords that hold one; the older ``items`` holds a list."""
NARROWING = {
    *("pattern", "minLength", "maxLength", "format", "enum", "const", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "items", "prefixItems"),
    *("additionalItems", "minItems", "maxItems", "properties", "required", "patternProperties"),
    *("additionalProperties", "minProperties", "maxProperties"),
}
"""Keywords that narrow the values of a type and that a grammar can enforce."""
_OF_TYPE = {"number": {"integer", "fraction"}}


def mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a keyword, empty where there is none."""
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def elements(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The list under a keyword, empty where there is none."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def required(schema: Mapping[str, Any]) -> list[str]:
    """Names of the properties that an object must have."""
    return [each for each in elements(schema, "required") if isinstance(each, str)]


def enumerated(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None where it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema names, or all; a number is an integer or a fraction."""
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named
    if not isinstance(types, list):
        return KINDS
    of_types = [_OF_TYPE.get(each, {each}) for each in types if isinstance(each, str)]
    return frozenset(itertools.chain.from_iterable(of_types))


def is_schema(value: Any) -> bool:
    """Whether a value can be a schema: an object, or a truth value."""
    return isinstance(value, Mapping | bool)


def parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that stand directly in another one."""
    for key in MAPS:
        yield from filter(is_schema, mapping(schema, key).values())
    for key in (*LISTS, *SINGLE):
        value = schema.get(key)
        yield from filter(is_schema, value if isinstance(value, list) else [value])


def with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The same schema in which each schema that stands directly in it is changed."""
    changed = dict(schema)
    for key in MAPS:
        if isinstance(schema.get(key), Mapping):
            members = schema[key].items()
            changed[key] = {name: change(v) if is_schema(v) else v for name, v in members}
    for key in (*LISTS, *SINGLE):
        value = schema.get(key)
        if isinstance(value, list):
            changed[key] = [change(each) if is_schema(each) else each for each in value]
        elif key in SINGLE and is_schema(value):
            changed[key] = change(value)
    return changed


def reached(
    schemas: Iterable[Any], following: Callable[[Mapping[str, Any]], Iterable[Any]]
) -> Iterator[Mapping[str, Any]]:
    """Those of the schemas that are objects, and what follows from these, each once."""
    waiting, seen = [*schemas], set[int]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping) and id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += following(node)


def combined(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas under a schema's combiners, which describe the same values."""
    return [branch for key in COMBINERS for branch in elements(schema, key)]


def kind_of(value: Any) -> str:
    """The type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
    return "object" if isinstance(value, Mapping) else "array"
