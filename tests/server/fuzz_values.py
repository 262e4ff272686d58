"""Values that a careless or hostile client sends: texts, numbers, nests, schemas, expressions.

Owns what is sent and knows no field. Everything is drawn from the generator that is handed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

NAME = "fuzz"
"""Under which the model is served."""


class Raw(str):
    """Text that goes into a body as it is, where JSON as Python writes it cannot say it."""

    __slots__ = ()


def document(value: Any) -> str:
    """JSON, with whatever is :class:`Raw` in it written out."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        inner = (f"{document(key)}:{document(each)}" for key, each in value.items())
        return "{" + ",".join(inner) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(document, value)) + "]"
    return json.dumps(value)


# --- scalars --------------------------------------------------------------------------------------

_TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\u202eright to left\u202c",
    "مرحبا بالعالم",
    "e\u0301\u0327" * 30,
    "\U0001f469\u200d\U0001f469\u200d\U0001f467" * 8,
    "\ufeffmark",
    "\uffff\ufffe",
    "\x1b[31mred\x07",
    "\r\n\r\nGET / HTTP/1.1\r\n",
    "data: [DONE]\n\n",
    "</s><|im_end|><|endoftext|><tool_call>",
    "{{ 7 * 7 }}{% raw %}{{ ''.__class__ }}",
    "../../../etc/passwd",
    "'; DROP TABLE users; --",
    "%s%n%x",
    "nan",
    "1e400",
)
_RAW_TEXTS = (r'"\ud800"', r'"\udfff\ud800"', r'"\u12"', '"\x01"', r'"\x41"', '"open', "'a'")
_NUMBERS = (0, -1, 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, 2**64, -(2**63) - 1)
_RAW_NUMBERS = (
    "NaN",
    "-Infinity",
    "Infinity",
    "1e400",
    "-1e400",
    "1e-400",
    "-0",
    "-0.0",
    "0.1",
    "01",
    "1.",
    "+1",
    "0x10",
    "1" * 400,
    "1" * 5000,
    "9" * 20 + ".5",
    "1e999999999",
)


def text(rng: Random) -> Any:
    kind = rng.randrange(10)
    if kind < 6:
        return rng.choice(_TEXTS)
    if kind == 6:
        return Raw(rng.choice(_RAW_TEXTS))
    if kind == 7:
        return "".join(chr(_code_point(rng)) for _ in range(rng.randrange(1, 60)))
    unit = rng.choice(["a", "ab ", "é", "\U0001f600", "\n", "{", "\\"])
    return unit * rng.choice([100, 5_000, 60_000])


def _code_point(rng: Random) -> int:
    code = rng.randrange(rng.choice([128, 0x800, 0x10000, 0x110000]))
    return code if not 0xD800 <= code < 0xE000 else 0xFFFD


def number(rng: Random) -> Any:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(_NUMBERS)
    if kind == 1:
        return Raw(rng.choice(_RAW_NUMBERS))
    return rng.choice([rng.uniform(-3, 3), rng.randrange(-100, 5000), rng.uniform(-1e300, 1e300)])


def nest(rng: Random) -> Any:
    """Lists and objects as deep, wide or large as a body can hold."""
    depth = rng.choice([3, 60, 150, 250, 5_000, 100_000])
    shapes: list[Callable[[], Any]] = [
        lambda: Raw("[" * depth + "]" * depth),
        lambda: Raw('{"a":' * depth + "1" + "}" * depth),
        lambda: Raw('[{"type":' * depth + "1" + "}]" * depth),
        lambda: Raw("[" * depth),
        lambda: [0] * rng.choice([1000, 100_000]),
        lambda: {f"k{i}": i for i in range(rng.choice([300, 20_000]))},
        lambda: [[]] * rng.choice([10, 5_000]),
    ]
    return rng.choice(shapes)()


def anything(rng: Random) -> Any:
    """A value of any type."""
    makers: list[Callable[[Random], Any]] = [text, number, text, number, nest]
    kind = rng.randrange(9)
    if kind < len(makers):
        return makers[kind](rng)
    return rng.choice([None, True, False, [], {}, [None], {"": ""}, [""], "1", [1], 1.0, "true"])


# --- shapes of an output --------------------------------------------------------------------------


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
            "(?i)STRASSE|ſ",
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
            '%import common.WORD\nstart: WORD',
            "%llguidance {}\nstart: @other",
            '%llguidance {"no_forcing": 3}\nstart: "a"',
            'start: %json {"$ref": "#"}',
            'start: A B\nA: /[^x]*/\nB: /[^y]*/',
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
