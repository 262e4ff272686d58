"""What the schema of a tool says of single parameters, for formats that write them one by one.

Owns the way from a written value to JSON. Schemas are callers' and may be malformed: what is not as
it should be counts as not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.json_schema import KINDS, kinds, mapping, required, target
from paceline.server.chat.calls.kind import Schema
from paceline.server.chat.calls.literals import MalformedError, json_of_literal

_DEEPEST = 8
_DEFINITIONS = ("$defs", "definitions")
STRING = frozenset({"string"})
_TYPES = {"fraction": "number"}
SCALARS = frozenset({"null", "boolean", "integer", "fraction"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter.

    Attributes:
        key: its name.
        schema: of its values, behind references.
        root: the document that its references lead into.
        is_required: a call has to have it.
    """

    key: str
    schema: Schema
    root: Schema
    is_required: bool = False

    @property
    def kinds(self) -> frozenset[str]:
        """Types of the values that it may have."""
        return _kinds(self.schema, self.root, _DEEPEST)

    @property
    def texts(self) -> list[str] | None:
        """The strings that alone are allowed; None where others are."""
        found = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        if not isinstance(found, list) or not found:
            return None
        return found if all(isinstance(each, str) for each in found) else None

    @property
    def scalars(self) -> list[str] | None:
        """The values that alone are allowed, as they are written bare; None where others are."""
        found = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        if not isinstance(found, list) or any(isinstance(each, list | dict) for each in found):
            return None
        return [each if isinstance(each, str) else json.dumps(each) for each in found] or None

    @property
    def without_strings(self) -> Schema:
        """The schema of those values that are no strings."""
        names = {_TYPES.get(each, each) for each in self.kinds - STRING}
        return {**self.whole, "type": sorted(names)}

    def by_type(self) -> dict[str, Schema]:
        """The same by the type that JSON calls them."""
        names = {_TYPES.get(each, each) for each in self.kinds - STRING}
        names -= {"integer"} if "number" in names else set()
        told = {name: "number" if name == "integer" else name for name in sorted(names)}
        return {told[name]: {**self.whole, "type": name} for name in told}

    @property
    def whole(self) -> Schema:
        """The schema as a document of its own; of anything where it leads out of that."""
        text = json.dumps(self.schema)
        if '"$ref"' not in text:
            return self.schema
        kept = {key: self.root[key] for key in _DEFINITIONS if key in self.root}
        count = sum(text.count(f'"$ref": "#/{key}/') for key in _DEFINITIONS)
        return {**self.schema, **kept} if count == text.count('"$ref": ') else {}

    def items(self) -> Parameter:
        """What the elements of its lists have to be."""
        return Parameter("", target(self.schema.get("items"), self.root), self.root)

    def as_json(self, text: str) -> str:
        """A value that is written without quotation marks, as JSON of a type that is allowed."""
        allowed = self.kinds
        found = None if allowed == STRING else _json_of(text.strip())
        if found is not None and (
            _kind_of(json.loads(found)) in allowed or "string" not in allowed
        ):
            return found
        return json.dumps(text, ensure_ascii=False)


def parameters(schema: Schema, root: Schema | None = None) -> list[Parameter] | None:
    """The parameters that a schema of an object names; None where it names none and allows any."""
    root = schema if root is None else root
    found, needed = _named(schema, root, _DEEPEST)
    found |= {name: {} for name in sorted(needed) if name not in found}
    if not found and target(schema, root).get("additionalProperties") is not False:
        return None
    return [
        Parameter(name, target(each, root), root, name in needed) for name, each in found.items()
    ]


def parameter(schema: Schema, key: str) -> Parameter:
    """One by its name; anything goes where the schema does not name it."""
    found, _ = _named(schema, schema, _DEEPEST)
    return Parameter(key, target(found.get(key), schema), schema)


def other(schema: Schema) -> Parameter:
    """Any that the schema does not name."""
    return Parameter("", target(target(schema, schema).get("additionalProperties"), schema), schema)


def _named(schema: Any, root: Schema, depth: int) -> tuple[dict[str, Any], set[str]]:
    """The properties that a schema names, in any of its branches, and which it requires."""
    schema = target(schema, root)
    found, needed = dict(mapping(schema, "properties")), required(schema)
    for key in ("allOf", "anyOf", "oneOf") if depth else ():
        branches = schema.get(key)
        for each in branches if isinstance(branches, list) else ():
            more, of_branch = _named(each, root, depth - 1)
            found |= {name: more[name] for name in more if name not in found}
            needed |= of_branch if key == "allOf" else set()
    return found, needed


def _kinds(schema: Schema, root: Schema, depth: int) -> frozenset[str]:
    found = kinds(schema)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found &= {_kind_of(each) for each in values}
    for key in ("anyOf", "oneOf", "allOf") if depth else ():
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            of_branches = [_kinds(target(each, root), root, depth - 1) for each in branches]
            if key == "allOf":
                found = found.intersection(*of_branches)
            else:
                found &= frozenset().union(*of_branches)
    return found & KINDS or KINDS


def _kind_of(value: Any) -> str:
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


def _json_of(text: str) -> str | None:
    """A value that is no string, as JSON; Python's spelling of it is understood too."""
    try:
        json.loads(text, parse_constant=_refuse)
        return None if text.startswith('"') else text
    except (ValueError, RecursionError):
        pass
    try:
        found = json_of_literal(text)
        return None if found.startswith('"') else found
    except MalformedError:
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
