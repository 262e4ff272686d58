"""What the schema of a tool says of single parameters, for formats that write them one by one.

Owns the way from a written value to JSON. Schemas are callers' and may be malformed: what is not as
it should be counts as not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import RequestError
from paceline.json_schema.keywords import KINDS, kind_of
from paceline.json_schema.resolver import Members, Resolver
from paceline.server.chat.calls.kind import Schema
from paceline.server.chat.calls.literals import MalformedError, json_of_literal

STRING = frozenset({"string"})
_TYPES = {"fraction": "number"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter.

    Attributes:
        key: its name.
        schema: of its values, an object or a truth value.
        resolver: of the document that the schema is from.
        is_required: a call has to have it.
    """

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
        found = self.resolver.values(self.schema)
        is_plain = found and not any(isinstance(each, list | dict) for each in found)
        others = self.narrowing - {"enum", "const"}
        return found if is_plain and not others and not self._has_choices else None

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
        told = {name: "number" if name == "integer" else name for name in sorted(names)}
        return {told[name]: {**self.whole, "type": name} for name in told}

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
        found = [node["items"] for node in nodes if "items" in node]
        return Parameter("", {"allOf": found} if len(found) > 1 else (*found, {})[0], self.resolver)

    def members(self) -> Members:
        """The properties of its objects."""
        return self.resolver.members(self.schema)

    def as_json(self, text: str) -> str:
        """A value that is written without quotation marks, as JSON of a type that is allowed."""
        for value in self.values or ():
            if text == bare(value):
                return json.dumps(value, ensure_ascii=False)
        allowed = self.kinds or KINDS
        found = None if allowed == STRING else _json_of(text.strip())
        if found is not None and (kind_of(json.loads(found)) in allowed or "string" not in allowed):
            return found
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
        found = json_of_literal(text)
        return None if found.startswith('"') else found
    except MalformedError:
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
