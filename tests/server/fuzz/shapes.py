"""Shapes of an output that a hostile client asks for: expressions, schemas, grammars, choices."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.server.fuzz.values import Raw, document, nest, text


def regex(rng: Random) -> Any:
    """Expressions that blow up elsewhere, or ask for what is not supported."""
    count = rng.choice([10, 1000, 100_000, 10**9])
    return rng.choice(
        [
            "(a+)+$",
            "(a|aa)+b",
            "(x+x+)+y",
            f"a{{{count}}}",
            f"(a{{{count}}}){{{count}}}",
            f"[ab]*a[ab]{{{min(count, 1000)}}}",
            f"(.*a){{{min(count, 1000)}}}",
            r"\p{L}+\p{Nd}{1,500}",
            r"\p{Nonsense}",
            r"[\u{10FFFF}-\u{0}]",
            r"(a)\1",
            r"(?<name>a)\k<name>",
            "(?=a)b",
            "(?<!a)b",
            "(?i)STRASSE|\u017f",
            "(" * 300 + "a" + ")" * 300,
            "|".join(f"w{i}.*" for i in range(300)),
            "[",
            "*",
            "a{2,1}",
            "",
            "\0",
            "^$",
            "(?:){1000}",
            ".{0,4000}x",
            "a" * 4097,
        ]
    )


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _doubling(depth: int, word: str) -> dict[str, Any]:
    definitions: dict[str, Any] = {"d0": {"type": "integer"}}
    for i in range(1, depth):
        definitions[f"d{i}"] = {word: [{"$ref": f"#/$defs/d{i - 1}"}] * 2}
    return {"$defs": definitions, "$ref": f"#/$defs/d{depth - 1}"}


def schema(rng: Random) -> Any:
    """JSON schemas that recur, explode, contradict themselves, or are none."""
    wide = {f"p{i}": {"type": "string", "pattern": "[a-z]{1,50}"} for i in range(300)}
    word = rng.choice(["anyOf", "oneOf", "allOf"])
    return rng.choice(
        [
            _deep(rng.choice([5, 25, 40, 90])),
            {"$ref": "#"},
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#"}}},
            {"type": "array", "items": {"$ref": "#"}},
            {"$ref": "https://example.com/schema.json"},
            {"$ref": "file:///etc/passwd"},
            {"$ref": "#/$defs/missing"},
            {"enum": [f"value {i}" for i in range(rng.choice([100, 4000, 20_000]))]},
            {"enum": []},
            {"const": Raw("1e400")},
            _doubling(rng.choice([8, 20, 60]), word),
            {word: [{"type": "string", "minLength": i} for i in range(200)]},
            {"allOf": [{"type": "string"}, {"type": "integer"}]},
            {"type": "integer", "minimum": 5, "maximum": 1},
            {"type": "string", "minLength": 10, "maxLength": 2},
            {"type": "string", "maxLength": rng.choice([10**4, 10**9])},
            {"type": "string", "pattern": regex(rng)},
            {"type": "string", "format": rng.choice(["date", "uuid", "nonsense"])},
            {"patternProperties": {"([": {}}},
            {"patternProperties": {"(a+)+$": {}, "^a*$": {"type": "integer"}}},
            {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
            {"type": "array", "uniqueItems": True, "maxItems": 3},
            {"type": "object", "properties": wide, "required": list(wide)},
            {"type": "object", "properties": wide, "additionalProperties": False},
            {"not": {}},
            {"type": "nonsense"},
            {"type": ["string", 3]},
            {"properties": []},
            {"type": "number", "multipleOf": rng.choice([0, 1e-9, 7, 10**30])},
            {"if": {"type": "object"}, "then": False},
            {"x-guidance": rng.choice([{"whitespace_pattern": "(a+)+"}, 3, {"lenient": True}])},
            {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
            nest(rng),
        ]
    )


def grammar(rng: Random) -> Any:
    """Lark grammars that are ambiguous, left-recursive, large, or wrong."""
    chain = "\n".join(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}" for i in range(rng.choice([20, 800])))
    last = chain.count("\n") + 1
    return rng.choice(
        [
            'start: start start | "a"',
            'start: start "a" | "a"',
            'start: a\na: b\nb: a | "x"',
            "start: start",
            'start: ""*',
            'start: (("a"?)*)*',
            f'start: r0\n{chain}\nr{last}: "x"',
            "start: " + " | ".join(f'"w{i}"' for i in range(5000)),
            'start: "a"{1000000}',
            'start: ("a" | "b" | "ab" | "ba" | "aba"){1,200}',
            "start: /(a+)+$/",
            "start: " + "(" * 400 + '"a"' + ")" * 400,
            "start: missing",
            'other: "a"',
            'start: "a',
            "%import common.WORD\nstart: WORD",
            "%llguidance {}\nstart: @other",
            '%llguidance {"no_forcing": 3}\nstart: "a"',
            'start: %json {"$ref": "#"}',
            "start: A B\nA: /[^x]*/\nB: /[^y]*/",
            'start: a["x","y"]\na: "b"',
            'start: "x"i %regex {"substring_words": "a b c"}',
            "start: <[0]> <[99999999]>",
            "start: <|im_end|>",
            "\0",
            text(rng),
        ]
    )


def choice(rng: Random) -> Any:
    return rng.choice(
        [
            [f"option {i}" for i in range(rng.choice([3, 999, 1001, 50_000]))],
            ["", "a"],
            ["a", "a"],
            ["a" * 70_000],
            ["\0", '"', "\\", "\n"],
            [text(rng), "b"],
            [["a"]],
            [],
            "yes",
        ]
    )


def structured(rng: Random) -> Any:
    """The field ``structured_outputs``."""
    makers = {"json": schema, "regex": regex, "grammar": grammar, "choice": choice}
    name = rng.choice(list(makers))
    value = makers[name](rng)
    if name == "json" and rng.random() < 0.2:
        value = document(value)
    found: dict[str, Any] = {name: value}
    if rng.random() < 0.1:
        found[rng.choice(["json_object", "regex", "unknown"])] = rng.choice([True, "a", None])
    return found
