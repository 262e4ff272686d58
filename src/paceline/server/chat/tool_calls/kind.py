"""What tool calls of all kinds have in common: how one is read, and how it is forced.

Owns what there is to know of a format, the structural tags that calls are composed of, where
brackets close, and how far the beginning of a call may reach. Knows no format of a model.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from paceline.request.structural_tags import MAX_PARTS

NAME = r"(?P<name>[\w.-]{1,64})"
"""Of a tool, in the pattern of a call's beginning."""
LONGEST_HEAD = 160
"""Characters within which what a call begins with must have come."""

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema]
"""The tools that were offered: name -> schema of the arguments."""


class ToolCall(NamedTuple):
    """A call as far as it is known; without a name it is none.

    ``arguments`` is JSON, and only grows. ``end`` is where what follows the call begins, None while
    that is to come.
    """

    name: str = ""
    arguments: str = ""
    end: int | None = 0


class CallText(Protocol):
    """The text behind what may have begun a call, as it grows."""

    def read(self, text: str) -> ToolCall | None:
        """The call that a text begins with; None while it cannot be told whether it is one."""
        ...


class ForcedCall(NamedTuple):
    """A tag of a call, and the keywords of its schema that the tag does not hold arguments to."""

    tag: Form
    unenforced: frozenset[str] = frozenset()


class CallKind(Protocol):
    """One way of writing a call."""

    def reader(self, tools: Tools) -> CallText: ...

    def forced(self, name: str, schema: Schema) -> ForcedCall:
        """What a call of this tool is, where it is forced to match the schema."""
        ...


@dataclass(frozen=True, slots=True)
class EitherKind:
    """A call may be written in several ways, and is forced to be in the first of them."""

    kinds: tuple[CallKind, ...]

    def reader(self, tools: Tools) -> CallText:
        return _EitherText([kind.reader(tools) for kind in reversed(self.kinds)])

    def forced(self, name: str, schema: Schema) -> ForcedCall:
        return self.kinds[0].forced(name, schema)


class _EitherText:
    def __init__(self, readers: Sequence[CallText]) -> None:
        self._readers = list(readers)

    def read(self, text: str) -> ToolCall | None:
        while True:
            call = self._readers[0].read(text)
            if call is None or call.name or len(self._readers) == 1:
                return call
            del self._readers[0]


class Head(NamedTuple):
    """What a call begins with, up to ``end``; without a name it is none."""

    name: str = ""
    end: int = 0


def find_head(pattern: str, last: str, text: str) -> Head | None:
    """What a call begins with; None while that is to come.

    Args:
        pattern: of it, with a group for the name; what it matches ends with or before ``last``.
        last: the character whose first appearance decides.
    """
    if text.find(last, 0, LONGEST_HEAD) < 0:
        return None if len(text) < LONGEST_HEAD else Head()
    head = re.match(pattern, text)
    return Head(head["name"], head.end()) if head else Head()


def unfinished_tag(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of ``text`` with which one of ``tags`` begins, short of all of it.

    >>> unfinished_tag("so <to", ["<tool_call>"])
    3
    """
    longest = max(map(len, tags), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        end = text[start:]
        if any(len(end) < len(tag) and tag.startswith(end) for tag in tags):
            return len(end)
    return 0


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
    """Where the brackets from a place of a text on are closed again or broken, or the text ends.

    A text that has grown is read on from where it ended.
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
class ToolFormat:
    """How a model writes calls: alone, or several of them between ``before`` and ``after``.

    Attributes:
        name: as users choose it.
        call: what one call is written like.
        opening: strings that calls begin with, wherever they stand.
        inner: more of them, which the call itself is read with.
        closing: strings dropped directly after a call.
        start: the character that begins a call at the start of the answer; "" if none does.
        again: characters that begin a call directly after another one.
        separator: what stands between two calls.
    """

    name: str
    call: CallKind
    opening: tuple[str, ...]
    closing: tuple[str, ...]
    inner: tuple[str, ...] = ()
    start: str = ""
    again: str = ""
    before: str = ""
    after: str = ""
    separator: str = ""


LIST_END = (",", "]")
"""What may stand behind a call in a list."""


Form = dict[str, Any]
"""A format of a structural tag."""

ANY_TEXT: Form = {"type": "any_text"}


def const(text: str) -> Form:
    return {"type": "const_string", "value": text}


def text_of(patterns: Iterable[str]) -> Form:
    """Free text that matches each of the patterns as a whole."""
    listed = list(patterns)
    return {**ANY_TEXT, "patterns": listed} if listed else ANY_TEXT


def regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def json_of(schema: Mapping[str, Any] | bool) -> Form:
    return {"type": "json_schema", "json_schema": schema}


def tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Form) -> Form:
    return _grouped("sequence", list(elements)) if elements else const("")


def one_of(elements: Iterable[Form]) -> Form:
    return _grouped("or", list(elements))


def _grouped(kind: str, elements: list[Form]) -> Form:
    """A format of any number of elements, of which one may have no more than so many."""
    if len(elements) <= MAX_PARTS:
        return {"type": kind, "elements": elements}
    groups = [elements[i : i + MAX_PARTS] for i in range(0, len(elements), MAX_PARTS)]
    return _grouped(kind, [_grouped(kind, group) for group in groups])


def optional(content: Form) -> Form:
    return {"type": "optional", "content": content}


def star(content: Form) -> Form:
    return {"type": "star", "content": content}


def separated(
    elements: Sequence[Form], separator: str, at_least_one: bool = False, only_one: bool = False
) -> Form:
    """Any number of the elements, in any order."""
    if len(elements) > MAX_PARTS:
        elements = [one_of(elements)]
    return {
        "type": "tags_with_separator",
        "tags": [each if each["type"] == "tag" else tag("", each, "") for each in elements],
        "separator": separator,
        "at_least_one": at_least_one,
        "stop_after_first": only_one,
    }


def call_tag(begin: str, name: str, content: Form, end: str) -> Form:
    """A call that begins with a text in which ``%s`` is its name and ``#`` is any number."""
    begin, has_number, middle = (begin.replace("%s", name)).partition("#")
    if has_number:
        content = sequence(regex("[0-9]{1,3}"), const(middle), content)
    return tag(begin, content, end)
