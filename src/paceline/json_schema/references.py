"""Where the references of a schema lead: pointers, anchors and identifiers within one document.

Owns the form in which a reference is plain: ``#/$defs/`` and a name, with all definitions at the
root. Texts of pointers are taken as people write them, with or without percent signs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from paceline.json_schema.keywords import (
    COMBINERS,
    elements,
    is_schema,
    mapping,
    parts,
    reached,
    required,
    with_parts,
)

_NAMING = {"$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$schema"}
"""Keywords that name a schema, and say nothing of values."""
_STORES = ("$defs", "definitions")


class References:
    """The references of one document. The document must not change meanwhile."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}
        self._targets: dict[int, Any] = {}
        self._has_plain_id = "draft-04" in str(_keyword(root, "$schema"))
        self._index(root, "")

    def target(self, schema: Mapping[str, Any]) -> Any:
        """The schema, an object or a truth value, that a ``$ref`` leads to; None where to none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return None
        if id(schema) not in self._targets:
            target = self._led_to(reference, self._bases.get(id(schema), ""))
            if not self.holds(schema):
                return target
            self._targets[id(schema)] = target
        return self._targets[id(schema)]

    def _led_to(self, reference: str, base: str) -> Any:
        try:
            is_within = reference.startswith("#")
            address, fragment = ("", reference[1:]) if is_within else urldefrag(reference)
            address = urljoin(base, address) if address else base
        except ValueError:  # no address at all
            return None
        target = self._found(address, fragment)
        if isinstance(target, Mapping) and id(target) not in self._bases:
            self._index(target, address)
        return target if is_schema(target) else None

    def holds(self, schema: Any) -> bool:
        """Whether it is a schema of the document, not one that was made of it."""
        return id(schema) in self._bases

    def _found(self, address: str, fragment: str) -> Any:
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((address, unquote(fragment)))
        resource = self._resources.get(address)
        target = _pointed(resource, unquote(fragment))
        return _pointed(resource, fragment) if target is None else target

    def _index(self, schema: Any, base: str) -> None:
        """Note where the schema and those in it stand, and what they are called."""
        waiting = [(schema, base)]
        while waiting:
            node, base = waiting.pop()
            if not isinstance(node, Mapping) or id(node) in self._bases:
                continue
            base = self._named(node, base)
            self._bases[id(node)] = base
            waiting += [(each, base) for each in parts(node)]

    def _named(self, node: Mapping[str, Any], base: str) -> str:
        """The base of references in a schema, by its own identifier if it has one."""
        name = node.get("$id", node.get("id") if self._has_plain_id else None)
        if isinstance(name, str):
            try:
                address, fragment = urldefrag(name)
                base = urljoin(base, address) if address else base
            except ValueError:
                address = fragment = ""
            if address:
                self._resources.setdefault(base, node)
            if fragment:
                self._anchors.setdefault((base, fragment), node)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(key), str):
                self._anchors.setdefault((base, node[key]), node)
        return base

    def behind(self, schema: Any) -> Any:
        """The schema behind references, as far as these end, without what stands beside them."""
        seen = set[int]()
        while isinstance(schema, Mapping) and "$ref" in schema and id(schema) not in seen:
            seen.add(id(schema))
            schema = self.target(schema)
        return {} if schema is None or id(schema) in seen else schema


def _keyword(schema: Any, key: str) -> Any:
    return schema.get(key) if isinstance(schema, Mapping) else None


def _pointed(node: Any, pointer: str) -> Any:
    """What a JSON pointer leads to; None where to nothing."""
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            is_place = name.isascii() and name.isdecimal() and int(name) < len(node)
            node = node[int(name)] if is_place else None
        else:
            node = _keyword(node, name)
    return node


def endless_reference(schema: Any) -> str | None:
    """A ``$ref`` that every value has to follow again and again; None where there is none.

    >>> endless_reference({"properties": {"next": {"$ref": "#"}}, "required": ["next"]})
    '#'
    """
    if not isinstance(schema, Mapping):
        return None
    references = References(schema)
    done: set[int] = set()
    path = {id(schema): ("", _needed(schema, references))}
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
            path[id(node)] = reference, _needed(node, references)
    return None


def _needed(
    schema: Mapping[str, Any], references: References
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What every value of a schema has to match as well, with the reference that leads there."""
    target = references.target(schema)
    if isinstance(target, Mapping):
        yield schema["$ref"], target
    schemas = []
    for key in COMBINERS:
        branches = elements(schema, key)
        if key == "allOf" or len(branches) == 1:
            schemas += branches
    properties, names = mapping(schema, "properties"), set(required(schema))
    schemas += [each for name, each in properties.items() if name in names]
    yield from (("", each) for each in schemas if isinstance(each, Mapping))


def with_plain_references(schema: Any) -> Any:
    """The same schema with plain references and without identifiers.

    What is referred to stands under ``$defs`` at the root, and a reference to it wherever it stood.
    A reference that leads nowhere within the document stays as it was written.

    >>> with_plain_references({"items": {"$ref": "#a"}, "$defs": {"x": {"$anchor": "a"}}})
    {'items': {'$ref': '#/$defs/x'}, '$defs': {'x': {}}}
    """
    return _Rewriting(schema).rewritten() if isinstance(schema, Mapping) else schema


class _Rewriting:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._references = References(root)
        self._root = root
        self._names: dict[int, str] = {}
        """Of what is referred to."""
        self._targets: list[Any] = []
        self._collect()

    def rewritten(self) -> dict[str, Any]:
        root: dict[str, Any] = self._inner(self._root)
        if self._targets:
            names = self._names
            root["$defs"] = {names[id(each)]: self._inner(each) for each in self._targets}
        return root

    def _collect(self) -> None:
        taken = set[str]()
        for node in reached([self._root], self._within):
            target = self._references.target(node)
            if target is not None and id(target) not in self._names:
                name = _free_name(node["$ref"], taken)
                taken.add(name)
                self._names[id(target)] = name
                self._targets.append(target)

    def _within(self, schema: Mapping[str, Any]) -> list[Any]:
        return [self._references.target(schema), *parts(_without_stores(schema))]

    def _outer(self, schema: Any) -> Any:
        """What stands in the place of a schema: a reference, where there are others to it."""
        if isinstance(schema, Mapping) and id(schema) in self._names:
            return {"$ref": f"#/$defs/{self._names[id(schema)]}"}
        return self._inner(schema)

    def _inner(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        target = self._references.target(schema)
        kept = {key: value for key, value in schema.items() if key not in _NAMING}
        kept = with_parts(_without_stores(kept), self._outer)
        if target is not None:
            kept["$ref"] = f"#/$defs/{self._names[id(target)]}"
        return kept


def _without_stores(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in schema.items() if key not in _STORES}


def _free_name(reference: str, taken: set[str]) -> str:
    """A name like the one that the reference ends with, in letters that no address changes."""
    last = unquote(reference.rpartition("/")[2])
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", last).strip("_") or "root"
    count = 1
    free = name
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    return free
