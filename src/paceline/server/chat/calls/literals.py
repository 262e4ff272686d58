"""Values and arguments as source code writes them: Python's literals, and those of Gemma.

Owns their grammar. Knows no tool.
"""

from __future__ import annotations

import json
import re
from typing import Any

from paceline.server.chat.calls.kind import Syntax, escapes, inside

PYTHON = Syntax(('"""', "'''", '"', "'"), "{}[]()")
_WORDS = {
    **dict.fromkeys(("True", "true"), True),
    **dict.fromkeys(("False", "false"), False),
    **dict.fromkeys(("None", "null"), None),
}
_SPACE = re.compile(r"\s*")
_BARE = re.compile(r"[^,:=\[\]{}()\s\"']+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "0": "\0",
    "\n": "",
    "\\": "\\",
    '"': '"',
    "'": "'",
    "/": "/",
}


class MalformedError(Exception):
    """A text is no value."""


def value_of(text: str, syntax: Syntax) -> Any:
    """
    Raises:
        MalformedError: the text is no value.
    """
    return _whole(text, syntax, lambda reader: reader.value())


def arguments_of(text: str, syntax: Syntax, mark: str) -> dict[str, Any]:
    """Keys and values with a mark between them, as a call has them between its brackets.

    Raises:
        MalformedError: the text is none.
    """
    found: dict[str, Any] = _whole(text, syntax, lambda reader: reader.members(mark, ""))
    return found


def _whole(text: str, syntax: Syntax, read: Any) -> Any:
    reader = _Reader(text, syntax)
    try:
        value = read(reader)
    except RecursionError:
        raise MalformedError from None
    reader.skip_space()
    if reader.at < len(text):
        raise MalformedError
    return value


class _Reader:
    """A text, read up to ``at``."""

    def __init__(self, text: str, syntax: Syntax) -> None:
        self._text = text
        self._syntax = syntax
        self.at = 0

    def skip_space(self) -> None:
        found = _SPACE.match(self._text, self.at)
        self.at = found.end() if found else self.at

    def value(self) -> Any:
        self.skip_space()
        if self._quote():
            return self._string()
        if self._takes("{"):
            return self.members(":", "}")
        for begin, end in ("[]", "()"):
            if self._takes(begin):
                return self._elements(end)
        return self._scalar()

    def members(self, mark: str, end: str) -> dict[str, Any]:
        """Up to the bracket ``end``, or with "" to the end of the text."""
        found: dict[str, Any] = {}
        while not self._ends(end):
            key = self._string() if self._quote() else self._bare()
            self.skip_space()
            if not self._takes(mark):
                raise MalformedError
            found[key] = self.value()
            self._separate(end)
        return found

    def _elements(self, end: str) -> list[Any]:
        found = []
        while not self._ends(end):
            found.append(self.value())
            self._separate(end)
        return found

    def _ends(self, end: str) -> bool:
        self.skip_space()
        return self._takes(end) if end else self.at == len(self._text)

    def _separate(self, end: str) -> None:
        """Past a comma, which may be missing before the end."""
        self.skip_space()
        if not self._takes(",") and self._text[self.at : self.at + 1] != end:
            raise MalformedError

    def _takes(self, text: str) -> bool:
        takes = self._text.startswith(text, self.at)
        self.at += len(text) if takes else 0
        return takes

    def _quote(self) -> str:
        quotes = self._syntax.quotes
        return next((each for each in quotes if self._text.startswith(each, self.at)), "")

    def _string(self) -> str:
        quote = self._quote()
        begin = self.at + len(quote)
        marks = inside(quote).finditer(self._text, begin)
        closing = next((each for each in marks if each[0] == quote), None)
        if closing is None:
            raise MalformedError
        self.at = closing.end()
        text = self._text[begin : closing.start()]
        return _unescaped(text) if escapes(quote) else text

    def _bare(self) -> str:
        found = _BARE.match(self._text, self.at)
        if found is None:
            raise MalformedError
        self.at = found.end()
        return found[0]

    def _scalar(self) -> Any:
        text = self._bare()
        if text in _WORDS:
            return _WORDS[text]
        if not _NUMBER.fullmatch(text):
            raise MalformedError
        try:
            value = json.loads(text)
        except ValueError:  # more digits than Python converts
            raise MalformedError from None
        if value in (float("inf"), float("-inf")):
            raise MalformedError
        return value


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    found = _ESCAPE.sub(_character, text)
    # Two halves of a character beyond the first plane, as JSON writes them, become one.
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    return chr(int(digits, 16)) if digits else _ESCAPED.get(escape[3], escape[0])
