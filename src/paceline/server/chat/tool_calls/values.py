"""Values as models write them: JSON, Python's literals, and those of Gemma, told as JSON.

Owns their grammar, and where their brackets close while they arrive. A model writes numbers that
JSON allows and no double holds, and words that JSON does not allow. Knows no tool.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

from paceline.text.detokenizer import unfinished_tag

_T = TypeVar("_T")
_WORDS = {
    **dict.fromkeys(("True", "true"), "true"),
    **dict.fromkeys(("False", "false"), "false"),
    **dict.fromkeys(("None", "null"), "null"),
}
_SPACE = re.compile(r"\s*")
_PREFIX = re.compile(r"""[rRuU](?=["'])""")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Syntax:
    """What strings and brackets look like.

    Attributes:
        quotes: marks that begin and end strings, longer ones first. A backslash escapes between
            those that are quotation marks.
        brackets: characters that nest.
        breaks: a character that cannot stand outside of strings; there something else begins.
        before: characters, or white space, that a quotation mark has to stand behind to begin a
            string; "" where it always does.
    """

    quotes: tuple[str, ...]
    brackets: str
    breaks: str = ""
    before: str = ""


def escapes(quote: str) -> bool:
    """Whether a backslash escapes between two of these quotes."""
    return quote[0] in "\"'"


JSON = Syntax(('"',), "{}[]", "<")


@functools.cache
def _outside(syntax: Syntax) -> re.Pattern[str]:
    behind = rf"(?<=[{re.escape(syntax.before)}\s])" if syntax.before else ""
    marks = [(behind if escapes(each) else "") + re.escape(each) for each in syntax.quotes]
    return re.compile("|".join([*marks, f"[{re.escape(syntax.brackets + syntax.breaks)}]"]))


@functools.cache
def inside(quote: str) -> re.Pattern[str]:
    """What counts inside of a string: the quote that ends it, and what is escaped."""
    escaped = r"|\\." if escapes(quote) else ""
    return re.compile(re.escape(quote) + escaped, re.DOTALL)


class Nesting(enum.Enum):
    OPEN = enum.auto()
    CLOSED = enum.auto()
    BROKEN = enum.auto()


class Brackets:
    """Where the brackets from a place of a text on are closed again or broken. A text that has
    grown is read on from where it ended.
    """

    def __init__(self, start: int, syntax: Syntax = JSON) -> None:
        self.end = start
        self.nesting = Nesting.OPEN
        self._syntax = syntax
        self._depth = 0
        self._quote = ""  # of the string that is open

    def read(self, text: str) -> Brackets:
        while self.nesting is Nesting.OPEN and self._read_mark(text):
            pass
        return self

    def _read_mark(self, text: str) -> bool:
        """Up to the next mark that counts; False if there is none yet."""
        quote = self._quote
        marks = (quote,) if quote else self._syntax.quotes
        limit = max(self.end, len(text) - unfinished_tag(text, marks))
        match = (inside(quote) if quote else _outside(self._syntax)).search(text, self.end)
        if match is None or match.start() >= limit:  # what comes next says which mark it is
            ends_escaping = quote and escapes(quote) and text.endswith("\\", self.end, limit)
            self.end = limit - bool(ends_escaping)
            return False
        mark, self.end = match[0], match.end()
        if quote:
            self._quote = quote if mark != quote else ""
        elif mark in self._syntax.quotes:
            self._quote = mark
        elif mark == self._syntax.breaks:
            self.end, self.nesting = match.start(), Nesting.BROKEN
        else:
            self._depth += 1 if mark in "{[(" else -1
            if self._depth <= 0:
                self.nesting = Nesting.CLOSED
        return True


@dataclass(frozen=True, slots=True)
class Literals:
    """How values are written.

    Attributes:
        syntax: of strings and brackets.
        key: the pattern of a key without quotation marks.
        word: the pattern of a value without quotation marks and brackets.
        is_python: strings have prefixes, and those next to each other are one; keys may be given
            as ``**{...}``. Otherwise a word that means nothing else is a string.
    """

    syntax: Syntax
    key: re.Pattern[str]
    word: re.Pattern[str]
    is_python: bool


PYTHON = Literals(
    Syntax(('"""', "'''", '"', "'"), "{}[]()"),
    key=re.compile(r"[^,:=*\[\]{}()\s\"']+"),
    word=re.compile(r"[^,:=\[\]{}()\s\"']+"),
    is_python=True,
)


class MalformedError(Exception):
    """A text is no value."""


def json_of_literal(text: str, literals: Literals = PYTHON) -> str:
    r"""A value as JSON; ``MalformedError`` where the text is none.

    >>> json_of_literal("[0x10, 'a' \"b\", None]")
    '[16, "ab", null]'
    """
    return _whole(text, literals, _LiteralReader.value)


def json_of_arguments(text: str, literals: Literals, mark: str, names: Collection[str] = ()) -> str:
    """The object that keys and values with a mark between them make, as JSON; ``MalformedError``
    where the text, which a call has between its brackets, is none. ``names`` are keys that may be
    written bare, whatever characters they have.
    """
    known = sorted(names, key=len, reverse=True)
    return _whole(text, literals, lambda reader: _object(reader.members(mark, "", known)))


def _whole(text: str, literals: Literals, read: Callable[[_LiteralReader], _T]) -> _T:
    reader = _LiteralReader(text, literals)
    try:
        value = read(reader)
    except RecursionError:
        raise MalformedError from None
    reader.skip_space()
    if reader.at < len(text):
        raise MalformedError
    return value


class _LiteralReader:
    """A text, read up to ``at``. Values are told as JSON."""

    def __init__(self, text: str, literals: Literals) -> None:
        self._text = text
        self._literals = literals
        self.at = 0

    def skip_space(self) -> None:
        space = _SPACE.match(self._text, self.at)
        self.at = space.end() if space else self.at

    def value(self) -> str:
        self.skip_space()
        if self._quote():
            return _dumped(self._strings())
        if self._takes("{"):
            return _object(self.members(":", "}"))
        if self._takes("["):
            return f"[{', '.join(self._elements(']')[0])}]"
        if self._literals.is_python and self._takes("("):
            elements, has_comma = self._elements(")")
            is_tuple = has_comma or not elements
            return f"[{', '.join(elements)}]" if is_tuple else elements[0]
        return self._scalar()

    def members(self, mark: str, end: str, names: Collection[str] = ()) -> dict[str, str]:
        """Up to the bracket ``end``, or with "" to the end of the text."""
        members: dict[str, str] = {}
        while not self._ends(end):
            if mark == "=" and self._takes("**{"):
                members |= self.members(":", "}")
            else:
                key = self._key(mark, names)
                members[key] = self.value()
            self._separate(end)
        return members

    def _key(self, mark: str, names: Collection[str]) -> str:
        for name in names:
            begin = self.at
            if self._takes(name):
                self.skip_space()
                if self._takes(mark):
                    return name
                self.at = begin
        key = self._strings() if self._quote() else self._bare(self._literals.key)
        self.skip_space()
        if not self._takes(mark):
            raise MalformedError
        return key

    def _elements(self, end: str) -> tuple[list[str], bool]:
        """What stands between commas, and whether one of them is the last."""
        elements, has_comma = list[str](), False
        while not self._ends(end):
            elements.append(self.value())
            has_comma = self._separate(end)
        return elements, has_comma or len(elements) > 1

    def _ends(self, end: str) -> bool:
        self.skip_space()
        return self._takes(end) if end else self.at == len(self._text)

    def _separate(self, end: str) -> bool:
        """Past a comma, if there is one; it may be missing before the end."""
        self.skip_space()
        if self._takes(","):
            return True
        if self._text[self.at : self.at + 1] != end:
            raise MalformedError
        return False

    def _takes(self, text: str) -> bool:
        takes = self._text.startswith(text, self.at)
        self.at += len(text) if takes else 0
        return takes

    def _quote(self) -> str:
        """What the string begins with that comes next; "" if none does."""
        prefix = _PREFIX.match(self._text, self.at) if self._literals.is_python else None
        begin = self.at + len(prefix[0] if prefix else "")
        quotes = self._literals.syntax.quotes
        quote = next((each for each in quotes if self._text.startswith(each, begin)), "")
        return self._text[self.at : begin] + quote

    def _strings(self) -> str:
        """One string, or in Python all of those that are next to each other."""
        text = self._string()
        while self._literals.is_python:
            begin = self.at
            self.skip_space()
            if not self._quote():
                self.at = begin
                break
            text += self._string()
        return text

    def _string(self) -> str:
        opening = self._quote()
        quote = opening.lstrip("rRuU")
        begin = self.at + len(opening)
        marks = inside(quote).finditer(self._text, begin)
        closing = next((each for each in marks if each[0] == quote), None)
        if closing is None:
            raise MalformedError
        self.at = closing.end()
        text = self._text[begin : closing.start()]
        is_raw = not escapes(quote) or opening[0] in "rR"
        return text if is_raw else unescaped(text)

    def _bare(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self.at)
        if match is None or not match[0].strip():
            raise MalformedError
        self.at = match.end()
        return match[0].strip()

    def _scalar(self) -> str:
        text = self._bare(self._literals.word)
        if text in _WORDS:
            return _WORDS[text]
        if _JSON_NUMBER.fullmatch(text):
            return text
        number = number_of(text)
        if number is None and self._literals.is_python:
            raise MalformedError
        return _dumped(text) if number is None else number


def _object(members: dict[str, str]) -> str:
    return f"{{{', '.join(f'{_dumped(key)}: {value}' for key, value in members.items())}}}"


def _dumped(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


_NUMBER = re.compile(r"[+-]?\.?[0-9](?:[eE][+-]|[0-9a-zA-Z_.])*", re.ASCII)
_ESCAPE = re.compile(
    r"""\\(?:N\{[^{}"\\\n]+\}|U[0-9a-fA-F]{8}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}"""
    r"""|[0-7]{1,3}|[abfnrtv\\'"\n])"""
)


def number_of(text: str) -> str | None:
    """A number that Python writes otherwise than JSON, as JSON; None if it is none."""
    if not _NUMBER.fullmatch(text):
        return None
    with contextlib.suppress(ValueError):
        return str(int(text, 0))
    with contextlib.suppress(ValueError, InvalidOperation):
        if set(text) & set(".eE"):
            value = float(text)  # JSON has numbers beyond a double's range, and no infinity
            return repr(value) if math.isfinite(value) else str(Decimal(text))
    return None


def unescaped(text: str) -> str:
    """A string by what stands between its quotation marks."""
    if "\\" not in text:
        return text
    characters = _ESCAPE.sub(_character, text)
    # Two halves of a character beyond the first plane, as JSON writes them, become one.
    return characters.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(escape: re.Match[str]) -> str:
    """What Python reads; a name or a number that no character has stays as it is written."""
    try:
        return str(ast.literal_eval(f'"{escape[0]}"'))
    except SyntaxError:
        return escape[0]


_LARGEST = sys.float_info.max
_MOST_DIGITS = sys.float_info.max_10_exp


def values_of(text: str) -> Any:
    """What the text says; numbers beyond a double's range are its largest one, and NaN is None.

    Raises:
        ValueError, RecursionError: it says nothing that is complete.

    >>> values_of('{"a": 1e505, "b": -Infinity, "c": NaN}')
    {'a': 1.7976931348623157e+308, 'b': -1.7976931348623157e+308, 'c': None}
    """
    return json.loads(text, parse_float=_float, parse_int=_integer, parse_constant=_float)


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call; none where the answer ended in their middle."""
    try:
        values = values_of(text)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _float(text: str) -> float | None:
    value = float(text)
    return None if math.isnan(value) else min(max(value, -_LARGEST), _LARGEST)


def _integer(text: str) -> float | None:
    return int(text) if len(text) <= _MOST_DIGITS else _float(text)
