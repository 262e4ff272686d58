"""Schemas that lead back to themselves, where the compiler of grammars takes a reference alone.

A schema of a list's nodes may say of the next node that it is one and has a value of 5 at least.
llguidance (1.9.1) compiles a reference that leads back to the definition which it is in only if
nothing else holds for the same value. Owns what is left out so that nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.json_schema.keywords import (
    COMBINERS,
    NARROWING,
    elements,
    kinds,
    mapping,
    with_parts,
)
from paceline.json_schema.references import References
from paceline.json_schema.resolver import Resolver

_LEADING = ("$ref", *COMBINERS)
"""Keywords whose schemas hold for the same value."""
_RULES = NARROWING | {"type", *_LEADING}


def with_lone_references(schema: Any) -> tuple[Any, frozenset[str]]:
    """A schema whose references stand alone where they lead back to their own definition.

    Args:
        schema: with plain references.

    Returns:
        the schema, and the keywords that were left out of it and say more than what stays.
    """
    definitions = mapping(schema, "$defs") if isinstance(schema, Mapping) else {}
    if not definitions:
        return schema, frozenset()
    loops = _Loops(schema)
    changed = {name: loops.without_rules(each, name) for name, each in definitions.items()}
    return {**schema, "$defs": changed}, frozenset(loops.left_out)


class _Loops:
    """One document."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._references = References(root)
        self._resolver = Resolver(root)
        definitions = mapping(root, "$defs")
        named_in = self._resolver.named_in
        self._names = {id(each): name for name, each in definitions.items()}
        self._loop_of = _loops({name: named_in(each) for name, each in definitions.items()})
        self.left_out = set[str]()

    def without_rules(self, schema: Any, name: str) -> Any:
        """A schema of the definition of this name."""
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
        """That which leads back; the others are left out."""
        lone = next(each for each in branches if self._leads_back([each], "allOf", name))
        others = [each for each in branches if each is not lone and isinstance(each, Mapping)]
        if any(_RULES & each.keys() for each in others):
            self.left_out.add("allOf")
        return lone

    def _leads_back(self, value: Any, key: str, name: str) -> bool:
        """Whether what holds for the same value leads back to the definition of this name."""
        schemas = [{"$ref": value}] if key == "$ref" else value if isinstance(value, list) else []
        loop = self._loop_of[name]
        return any(self._loop_of[each] == loop for each in self._named(_in_place(schemas)))

    def _named(self, schemas: Iterator[Mapping[str, Any]]) -> Iterator[str]:
        """Names of the definitions that schemas refer to."""
        for each in schemas:
            target = self._references.target(each)
            if id(target) in self._names:
                yield self._names[id(target)]


def _in_place(schemas: list[Any]) -> Iterator[Mapping[str, Any]]:
    """Schemas, and those in them that hold for the same value."""
    waiting = list(schemas)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            yield node
            waiting += [branch for key in COMBINERS for branch in elements(node, key)]


def _loops(direct: Mapping[str, set[str]]) -> dict[str, str]:
    """For each definition, the same name as for all that it leads to and that lead to it.

    Kosaraju's algorithm: whatever ends last reaches the rest of its loop against the arrows.
    """
    against: dict[str, set[str]] = {name: set() for name in direct}
    for name, targets in direct.items():
        for each in targets:
            against[each].add(name)
    found = dict[str, str]()
    for first in reversed(_by_end(direct)):
        waiting = [first]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = first
                waiting += against[name]
    return found


def _by_end(direct: Mapping[str, set[str]]) -> list[str]:
    """Definitions in the order in which a walk in depth is done with them."""
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
