"""Schemas of arguments, each with something that is easily promised and not held."""

from __future__ import annotations

from typing import Any

INT: dict[str, Any] = {"type": "integer"}
TEXT: dict[str, Any] = {"type": "string"}
NULL: dict[str, Any] = {"type": "null"}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


DEFS = {
    "$defs": {
        "I": INT,
        "S": TEXT,
        "five": {"minimum": 5},
        "a b": INT,
        "\u00fc": INT,
        "x[y]": INT,
        "named": {"$anchor": "here", "type": "integer", "maximum": 9},
        "placed": {"$id": "http://example.com/i", "type": "integer", "minimum": 3},
    }
}


def referring(reference: str, **beside: Any) -> dict[str, Any]:
    return {**of(a={"$ref": reference, **beside}), **DEFS}


def chain(step: dict[str, Any]) -> dict[str, Any]:
    node = {"type": "object", "properties": {"v": INT, "n": step}, "required": ["v"]}
    return {"$ref": "#/$defs/N", "$defs": {"N": node}}


REFERENCES = {
    "with a bound": referring("#/$defs/I", minimum=5),
    "with a length": referring("#/$defs/S", minLength=3),
    "with values": referring("#/$defs/S", enum=["p", "q"]),
    "joined": {**of(a={"allOf": [{"$ref": "#/$defs/I"}, {"$ref": "#/$defs/five"}]}), **DEFS},
    "to an anchor": referring("#here"),
    "to an identifier": referring("http://example.com/i"),
    "percent": referring("#/%24defs/I"),
    "percent, space": referring("#/$defs/a%20b"),
    "percent, umlaut": referring("#/$defs/%C3%BC"),
    "percent, brackets": referring("#/$defs/x%5By%5D"),
    "raw space": referring("#/$defs/a b"),
    "raw umlaut": referring("#/$defs/\u00fc"),
    "raw brackets": referring("#/$defs/x[y]"),
    "to the root": {
        "type": "object",
        "properties": {"a": INT, "b": {"$ref": "#"}},
        "required": ["a"],
    },
    "to the root, text": {
        "type": "object",
        "properties": {"v": {**TEXT, "maxLength": 3}, "n": {"$ref": "#"}},
        "required": ["v"],
    },
    "of the root": {
        "$ref": "#/$defs/P",
        "required": ["b"],
        "$defs": {"P": {"type": "object", "properties": {"a": INT, "b": {**TEXT, "maxLength": 2}}}},
    },
    "joined by the root": {
        "allOf": [{"$ref": "#/$defs/P"}, {"properties": {"a": {"maximum": 9}}}],
        "$defs": {"P": of(a=INT)},
    },
    "a list": {
        "$ref": "#/$defs/N",
        "$defs": {
            "N": {
                "type": "object",
                "properties": {"v": INT, "n": {"anyOf": [{"$ref": "#/$defs/N"}, NULL]}},
                "required": ["v"],
            }
        },
    },
    "dangling": referring("#/$defs/nowhere"),
    "in its loop, with a type": chain({"$ref": "#/$defs/N", "type": "object", "title": "next"}),
    "in its loop, with a name": chain({"$ref": "#/$defs/N", "required": ["n"]}),
    "in its loop, joined": chain({"allOf": [{"$ref": "#/$defs/N"}, {"minProperties": 1}]}),
    "in its loop, or null": chain(
        {"anyOf": [{"$ref": "#/$defs/N"}, NULL], "type": ["object", "null"]}
    ),
    "in its loop, to the root": {
        "type": "object",
        "properties": {"v": INT, "n": {"$ref": "#", "nullable": True, "minProperties": 1}},
        "required": ["v"],
    },
    "outside its loop": {
        **of(a={"$ref": "#/$defs/N", "required": ["n"]}),
        "$defs": chain({"anyOf": [{"$ref": "#/$defs/N"}, NULL]})["$defs"],
    },
    "in an object": {**of(a=of(b={"$ref": "#/$defs/I", "minimum": 5})), **DEFS},
    "in a list": {
        **of(a={"type": "array", "items": {"$ref": "#/$defs/I", "minimum": 4}, "maxItems": 2}),
        **DEFS,
    },
}
VALUES = {
    "joined bound": of(a={"allOf": [INT, {"minimum": 5}]}),
    "joined pattern": of(a={"allOf": [TEXT, {"pattern": "^a+$"}], "maxLength": 3}),
    "enum and bound": of(a={"enum": [1, 10], "minimum": 5}),
    "enum and length": of(a={"enum": ["a", "bbb"], "minLength": 2}),
    "enum and type": of(a={"type": "string", "enum": ["a", 1]}),
    "enum of all types": of(a={"enum": ["1", 1, "null", None, True, "true"]}),
    "enum of some": of(a={"type": ["string", "integer"], "enum": ["a", 3]}),
    "enum of a list": of(a={"enum": [[1], "a"]}),
    "true alone": of(a={"const": True}),
    "false alone": of(a={"type": "boolean", "enum": [False]}),
    "true, joined": of(a={"allOf": [{"type": "boolean"}, {"const": True}]}),
    "one of two": of(a={"anyOf": [{"const": True}, {"const": None}]}),
    "line break": of(a={"const": "x\ny"}),
    "fraction": of(a={"const": 1.5}),
    "object": of(a={"const": {"q": 1}}),
    "text or null": of(a={"anyOf": [{**TEXT, "minLength": 2}, NULL]}),
    "text or number": of(a={"anyOf": [{**TEXT, "minLength": 3}, {**INT, "minimum": 5}]}),
    "values or null": of(a={"anyOf": [{"enum": ["p", "q"]}, NULL]}),
    "values by oneOf": of(a={"oneOf": [{"const": "p"}, {"const": "q"}]}),
    "choices in choices": of(
        a={"anyOf": [{"anyOf": [{"enum": ["x"]}, INT]}, {"allOf": [TEXT, {"maxLength": 1}]}]}
    ),
    "joined choices": of(a={"allOf": [{"anyOf": [TEXT, INT]}, {"anyOf": [INT, NULL]}]}),
    "choice and type": of(a={"allOf": [{"anyOf": [TEXT, INT]}, TEXT], "maxLength": 2}),
    "pattern or null": of(a={"type": ["string", "null"], "pattern": "^N"}),
    "Python's null": of(a={"type": ["string", "null"], "enum": ["None", "a", None]}),
    "joined items": of(a={"allOf": [{"type": "array", "items": INT}, {"items": {"minimum": 5}}]}),
    "counted items": of(a={"type": "array", "items": INT, "minItems": 2, "maxItems": 3}),
    "items by place": of(a={"type": "array", "prefixItems": [INT], "items": TEXT}),
    "steps": of(a={"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 2}),
    "length as a fraction": of(a={**TEXT, "minLength": 2.0}),
    "date": of(a={**TEXT, "format": "date"}),
    "not": of(a={"not": TEXT}),
    "condition": of(a={"if": TEXT, "then": {"minLength": 2}}),
}
OBJECTS = {
    "property that may not be": {
        "type": "object",
        "properties": {"a": INT, "b": False},
        "required": ["a"],
    },
    "none but one that may not be": {"type": "object", "properties": {"a": False}},
    "required, not described": {"type": "object", "properties": {"a": INT}, "required": ["a", "z"]},
    "only required": {"type": "object", "required": ["z"]},
    "required among others": {
        "type": "object",
        "properties": {"a": INT},
        "required": ["z"],
        "additionalProperties": TEXT,
    },
    "others alone": {"type": "object", "additionalProperties": {**INT, "minimum": 4}},
    "none": {"type": "object", "additionalProperties": False},
    "named none": {"type": "object", "properties": {}},
    "joined": {"allOf": [of(a=INT), of(b={"minimum": 3, "type": "integer"})]},
    "joined bound": {"allOf": [of(a=INT), {"properties": {"a": {"minimum": 5}}}]},
    "joined within": of(a={"allOf": [of(b=INT), of(c={**TEXT, "maxLength": 2})]}),
    "others within": of(
        a={"type": "object", "properties": {"b": INT}, "additionalProperties": TEXT}
    ),
    "choice": {"anyOf": [of(a=INT), of(b=TEXT)]},
    "choice by a mark": {"oneOf": [of(k={"const": "x"}, a=INT), of(k={"const": "y"}, a=TEXT)]},
    "choice of the required": {
        "type": "object",
        "properties": {"a": INT, "b": INT},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "at most": {
        "type": "object",
        "properties": {"a": INT, "b": INT},
        "required": ["a"],
        "maxProperties": 1,
    },
    "at least": {"type": "object", "properties": {"a": INT, "b": INT}, "minProperties": 1},
    "at least, of any": {"type": "object", "minProperties": 2},
    "at most, of any": {"type": "object", "maxProperties": 1},
    "pattern": {"type": "object", "patternProperties": {"^x": INT}},
    "pattern and others": {
        "type": "object",
        "patternProperties": {"^x": INT},
        "additionalProperties": TEXT,
    },
    "pattern and names": {
        **of(xa=TEXT, b=INT),
        "patternProperties": {"^x": {"maxLength": 2}},
    },
    "values": {"type": "object", "enum": [{"a": 1}]},
    "value": {"type": "object", "properties": {"a": INT}, "const": {"a": 4}},
}
CASES = {
    f"{kind}: {name}": schema
    for kind, schemas in (("$ref", REFERENCES), ("value", VALUES), ("object", OBJECTS))
    for name, schema in schemas.items()
}
LEFT = {
    "$ref: dangling": ["$ref"],
    "$ref: in its loop, with a name": ["required"],
    "$ref: in its loop, joined": ["allOf"],
    "$ref: in its loop, to the root": ["minProperties"],
    "value: not": ["not"],
    "value: condition": ["if", "then"],
    "object: choice": ["anyOf"],
    "object: choice by a mark": ["anyOf"],
    "object: choice of the required": ["anyOf"],
    "object: at most": ["maxProperties"],
    "object: at least": ["minProperties"],
    "object: at least, of any": ["minProperties"],
    "object: at most, of any": ["maxProperties"],
    "object: pattern": ["patternProperties"],
    "object: pattern and others": ["additionalProperties", "patternProperties"],
    "object: pattern and names": ["patternProperties"],
    "object: values": ["enum"],
    "object: value": ["const"],
}
"""Keywords that no format that writes parameters one by one holds."""
LEFT_BARE = {
    "value: enum of a list": ["enum"],
    "value: text or number": ["minLength", "minimum"],
    "value: choices in choices": ["enum", "maxLength"],
}
"""And those that are not held where a string looks like any other value."""
LEFT_COUNTS = {
    "$ref: in a list": ["maxItems"],
    "value: counted items": ["maxItems", "minItems"],
}
"""And where lists are written with marks of the model's own."""
