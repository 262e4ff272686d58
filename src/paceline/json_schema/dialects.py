"""What other dialects write otherwise than JSON Schema does, in words that compilers know.

That is ``nullable`` of OpenAPI 3.0, which allows null beside what the schema describes, and counts
with a decimal point, which JSON does not tell from those without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.json_schema.keywords import COMBINERS, with_parts

_NARROWS = {"type", "enum", "const", "$ref", *COMBINERS}
_COUNTS = ("Length", "Items", "Properties")


def in_plain_words(schema: Any) -> Any:
    """The same schema in the words of JSON Schema alone; its root is not made null.

    >>> in_plain_words({"items": {"type": "string", "nullable": True, "minLength": 2.0}})
    {'items': {'type': ['string', 'null'], 'minLength': 2}}
    """
    return _plain(schema) if isinstance(schema, Mapping) else schema


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = with_parts(schema, _nullable)
    for key in (f"{end}{each}" for end in ("min", "max") for each in _COUNTS):
        number = found.get(key)
        if isinstance(number, float) and number.is_integer():
            found[key] = int(number)
    return found


def _nullable(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = _plain(schema)
    if found.get("nullable") is not True or not _NARROWS & found.keys():
        return found
    del found["nullable"]
    types = found.get("type")
    if isinstance(types, str) and not (_NARROWS - {"type"}) & found.keys():
        return {**found, "type": [types, "null"]} if types != "null" else found
    return {"anyOf": [found, {"type": "null"}]}
