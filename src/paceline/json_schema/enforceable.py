"""JSON schemas without the keywords that a grammar cannot enforce: those become annotations.

Owns what the compiler of grammars supports; a test holds that against the compiler. A ``oneOf``
stays where its schemas exclude each other, so that no value matches two of them. References that
lead back to their own definition stay alone: a schema of a list's nodes may say of the next node
that it is one and has a value of 5 at least, and llguidance (1.9.1) compiles such a reference only
if nothing else holds for the same value. Knows no request and compiles nothing.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.json_schema.keywords import (
    COMBINERS,
    NARROWING,
    combined,
    enumerated,
    kinds,
    mapping,
    reached,
    required,
    with_parts,
)
from paceline.json_schema.references import References
from paceline.json_schema.resolver import MOST_JOINED, Resolver, joined

UNENFORCED = {
    *("$dynamicRef", "$recursiveRef", "not", "if", "then", "else"),
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
    *("propertyNames", "unevaluatedProperties"),
    *("dependencies", "dependentRequired", "dependentSchemas"),
}
"""Keywords that mean something and cannot be enforced."""
FORMATS = {
    *("date-time", "date", "time", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uuid", "uri", "unknown"),
}
"""Formats of strings that can be."""
_ASKS_FOR_NOTHING: tuple[tuple[str, Any], ...] = (
    ("uniqueItems", False),
    ("unevaluatedItems", True),
    ("unevaluatedProperties", True),
    ("propertyNames", True),
)
# An escape, a class, a group that looks around or back, or an anchor.
_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?|\]|\(\?(?:<?[=!]|>|P=|\()|[\^$]", re.DOTALL)
_ESCAPED_LETTERS = frozenset("dDwWsSnrtfvaxuUpPAz")
_BEFORE_START = ("(", "|", "(?:")
_AFTER_END = (")", "|")


@dataclass(frozen=True, slots=True)
class Enforceable:
    """A schema without what cannot be enforced, and the names of the keywords that were left out.

    Whatever matches the schema that was given matches this one.
    """

    schema: Any
    unenforced: tuple[str, ...]


def enforceable(schema: Any) -> Enforceable:
    """Leave out of a schema what cannot be enforced. What is malformed stays as it is.

    >>> enforceable({"type": "array", "uniqueItems": True})
    Enforceable(schema={'type': 'array'}, unenforced=('uniqueItems',))
    """
    left_out: set[str] = set()
    kept, left = with_lone_references(_Relaxation(schema, left_out).relaxed(schema))
    return Enforceable(kept, tuple(sorted(left_out | left)))


class _Relaxation:
    """One schema while it is gone through; ``left_out`` collects the keywords that are."""

    def __init__(self, root: Any, left_out: set[str]) -> None:
        self._references = References(root)
        self._left_out = left_out
        self._num_compared = 0

    def relaxed(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        kept = {key: schema[key] for key in schema if not self._is_dropped(key, schema)}
        kept = with_parts(kept, self.relaxed)
        self._drop_patterns_of_names(kept)
        return self._with_any_of(kept)

    def _is_dropped(self, key: str, schema: Mapping[str, Any]) -> bool:
        value = schema[key]
        drops = key in UNENFORCED
        if key == "format" and isinstance(value, str):
            drops = value not in FORMATS and "string" in kinds(schema)
        elif key == "pattern" and isinstance(value, str):
            drops = not is_supported_pattern(value)
        elif key in ("minProperties", "maxProperties"):
            drops = not mapping(schema, "properties").keys() <= set(required(schema))
        elif key in ("$ref", "allOf"):
            drops = self._leads_too_far(schema) or (
                key == "$ref" and self._references.target(schema) is None
            )
        asks = (key, value) not in _ASKS_FOR_NOTHING
        if drops and asks:
            self._left_out.add(key)
        return drops

    def _leads_too_far(self, schema: Mapping[str, Any]) -> bool:
        return len(joined(schema, self._references, MOST_JOINED + 1)) > MOST_JOINED

    def _drop_patterns_of_names(self, kept: dict[str, Any]) -> None:
        named = mapping(kept, "patternProperties")
        supported = {name: each for name, each in named.items() if is_supported_pattern(name)}
        if len(supported) < len(named):
            self._left_out.add("patternProperties")
            kept["patternProperties"] = supported
            kept.pop("additionalProperties", None)  # it would hold for their values too

    def _with_any_of(self, kept: dict[str, Any]) -> dict[str, Any]:
        """``oneOf`` as ``anyOf``, which it equals where no value matches two of its branches."""
        branches = kept.get("oneOf")
        if not isinstance(branches, list):
            return kept
        rest = {key: value for key, value in kept.items() if key != "oneOf"}
        self._num_compared += len(branches)
        if self._num_compared > MOST_COMPARED or not are_disjoint(branches, self._references):
            self._left_out.add("oneOf")
        if "anyOf" not in rest:
            return {**rest, "anyOf": branches}
        others = rest.get("allOf")
        both = [*(others if isinstance(others, list) else ()), {"anyOf": branches}]
        return {**rest, "allOf": both}


def is_supported_pattern(pattern: str) -> bool:
    """Whether a regular expression has nothing that depends on what is around the match.

    That is word boundaries, looking around, back-references, and anchors in the middle. What is no
    regular expression counts as supported: the compiler says what is wrong with it.
    """
    in_class = False
    for part in _REGEX_PARTS.finditer(pattern):
        text = part[0]
        if text[0] == "\\":
            letter = text[1]
            if letter.isascii() and letter.isalnum() and letter not in _ESCAPED_LETTERS:
                return False
        elif in_class:
            in_class = text != "]"
        elif text[0] == "[":
            in_class = True
        elif text == "^":
            if part.start() and not pattern.endswith(_BEFORE_START, 0, part.start()):
                return False
        elif text == "$":
            if part.end() < len(pattern) and not pattern.startswith(_AFTER_END, part.end()):
                return False
        elif text != "]":
            return False
    return True


_LEADING = ("$ref", *COMBINERS)
"""Keywords whose schemas hold for the same value."""
_RULES = NARROWING | {"type", *_LEADING}


def with_lone_references(schema: Any) -> tuple[Any, frozenset[str]]:
    """A schema whose references stand alone where they lead back to their own definition, and the
    keywords that were left out and say more than what stays. Its references are plain.
    """
    definitions = mapping(schema, "$defs") if isinstance(schema, Mapping) else {}
    if not definitions:
        return schema, frozenset()
    loops = _Loops(schema)
    changed = {name: loops.without_rules(each, name) for name, each in definitions.items()}
    return {**schema, "$defs": changed}, frozenset(loops.left_out)


class _Loops:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._resolver = Resolver(root)
        named_in, definitions = self._resolver.named_in, mapping(root, "$defs")
        self._loop_of = _loops({name: named_in(each) for name, each in definitions.items()})
        self.left_out = set[str]()

    def without_rules(self, schema: Any, name: str) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        leading = [key for key in _LEADING if self._leads_back(schema.get(key), key, name)]
        if not leading:
            return with_parts(schema, lambda each: self.without_rules(each, name))
        key = leading[0]
        kept = {key: schema[key]}
        if key == "allOf":
            kept[key] = [self._only_branch(schema[key], name)]
        left = (_RULES & schema.keys()) - {key}
        if "type" in left and self._resolver.kinds(kept) <= kinds(schema):
            left -= {"type"}
        self.left_out |= left
        return with_parts(kept, lambda each: self.without_rules(each, name))

    def _only_branch(self, branches: list[Any], name: str) -> Any:
        lone = next(each for each in branches if self._leads_back([each], "allOf", name))
        others = [each for each in branches if each is not lone and isinstance(each, Mapping)]
        if any(_RULES & each.keys() for each in others):
            self.left_out.add("allOf")
        return lone

    def _leads_back(self, value: Any, key: str, name: str) -> bool:
        """Whether what holds for the same value leads back to the definition of this name."""
        schemas = [{"$ref": value}] if key == "$ref" else value if isinstance(value, list) else []
        loop = self._loop_of[name]
        references = (str(each.get("$ref", "")) for each in reached(schemas, combined))
        names = (reference.removeprefix("#/$defs/") for reference in references)
        return any(self._loop_of.get(each) == loop for each in names)


def _loops(direct: Mapping[str, set[str]]) -> dict[str, str]:
    """For each definition, the same name as for all that it leads to and that lead to it.

    Kosaraju's algorithm: whatever ends last reaches the rest of its loop against the arrows.
    """
    against: dict[str, set[str]] = {name: set() for name in direct}
    for name, targets in direct.items():
        for each in targets:
            against[each].add(name)
    loop_of = dict[str, str]()
    for first in reversed(_by_end(direct)):
        waiting = [first]
        while waiting:
            name = waiting.pop()
            if name not in loop_of:
                loop_of[name] = first
                waiting += against[name]
    return loop_of


def _by_end(direct: Mapping[str, set[str]]) -> list[str]:
    done, seen = list[str](), set[str]()
    for first in direct:
        path = [(first, iter(direct[first]))] if first not in seen else []
        seen.add(first)
        while path:
            name, targets = path[-1]
            step = next((each for each in targets if each not in seen), None)
            if step is None:
                done.append(name)
                path.pop()
            else:
                seen.add(step)
                path.append((step, iter(direct[step])))
    return done


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
    target = references.behind(schema)
    return target if isinstance(target, Mapping) else {}


def _values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    values = enumerated(schema)
    if values is None or len(values) > MOST_COMPARED:
        return None
    return frozenset(json.dumps(each, sort_keys=True) for each in values)
