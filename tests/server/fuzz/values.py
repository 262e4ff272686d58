"""Values that a careless or hostile client sends: texts, numbers, nests.

Owns what is sent and knows no field. Everything is drawn from the generator that is handed in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

NAME = "fuzz"
"""Under which the model is served."""
_MARK = "written out: "
_MARKED = re.compile(f'"{_MARK}([0-9]+)"')


@dataclass(frozen=True, slots=True)
class Raw:
    """Text that goes into a body as it is, where JSON as Python writes it cannot say it."""

    text: str


def document(value: Any) -> str:
    """JSON, with whatever is :class:`Raw` in it written out."""
    found: list[str] = []

    def mark(raw: Raw) -> str:
        found.append(raw.text)
        return f"{_MARK}{len(found) - 1}"

    written = json.dumps(value, default=mark)
    return _MARKED.sub(lambda match: found[int(match[1])], written)


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
