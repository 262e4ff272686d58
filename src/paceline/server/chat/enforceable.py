"""JSON schemas without the keywords that a grammar cannot enforce: those become annotations.

Owns what the compiler of grammars supports; a test holds that against the compiler. Knows no
request and compiles nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.json_schema.disjoint import MOST_COMPARED, are_disjoint
from paceline.json_schema.keywords import kinds, mapping, required, with_parts
from paceline.json_schema.loops import with_lone_references
from paceline.json_schema.references import References
from paceline.json_schema.resolver import MOST_JOINED, joined

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
    found: set[str] = set()
    kept, left = with_lone_references(_Relaxation(schema, found).relaxed(schema))
    return Enforceable(kept, tuple(sorted(found | left)))


class _Relaxation:
    """One schema while it is gone through; ``found`` collects the keywords that are left out."""

    def __init__(self, root: Any, found: set[str]) -> None:
        self._references = References(root)
        self._found = found
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
            self._found.add(key)
        return drops

    def _leads_too_far(self, schema: Mapping[str, Any]) -> bool:
        return len(joined(schema, self._references, MOST_JOINED + 1)) > MOST_JOINED

    def _drop_patterns_of_names(self, kept: dict[str, Any]) -> None:
        named = mapping(kept, "patternProperties")
        supported = {name: each for name, each in named.items() if is_supported_pattern(name)}
        if len(supported) < len(named):
            self._found.add("patternProperties")
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
            self._found.add("oneOf")
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
