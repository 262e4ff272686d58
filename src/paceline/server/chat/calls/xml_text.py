"""Calls between tags while they are read: see :mod:`paceline.server.chat.calls.xml_calls`."""

from __future__ import annotations

import json
import re

from paceline.server.chat.calls.kind import (
    LONGEST_HEAD,
    Brackets,
    Call,
    Nesting,
    Tools,
    find_head,
    unfinished_tag,
)
from paceline.server.chat.calls.parameters import STRING, Parameter, parameter
from paceline.server.chat.calls.xml_marks import XmlMarks


class XmlText:
    """See :class:`~paceline.server.chat.calls.kind.CallText`."""

    def __init__(self, kind: XmlMarks, tools: Tools) -> None:
        self._kind = kind
        self._tools = tools
        self._name = ""
        self._at = 0  # how far the text has been read
        self._arguments = ""
        self._parameter: Parameter | None = None  # that whose value is being read
        self._is_string = False
        self._is_json = False  # the value is, as the format says or the schema
        self._has_begun = False  # the value has, behind its padding or the mark of a section
        self._closing = ""  # what ends the value
        self._json: Brackets | None = None  # of the value, if it begins with one
        self._searched = 0  # up to where the value's end has been looked for
        self._end: int | None = None

    def read(self, text: str) -> Call | None:
        if not self._name:
            head = find_head(self._kind.head, self._kind.last, text)
            if head is None:
                return None
            if head.name not in self._tools:
                return Call()
            self._name, self._at, self._arguments = head.name, head.end, "{"
        while self._end is None and self._step(text):
            pass
        return Call(self._name, self._arguments, self._end)

    def _step(self, text: str) -> bool:
        """One tag or value on; False where more is needed."""
        if self._parameter is None:
            return self._read_tag(text)
        if not self._has_begun and not self._begin_value(text):
            return False
        return self._read_string(text) if self._is_string else self._read_other(text)

    def _read_tag(self, text: str) -> bool:
        kind = self._kind
        rest = text[self._at : self._at + LONGEST_HEAD].lstrip()
        at = self._at + len(text[self._at : self._at + LONGEST_HEAD]) - len(rest)
        found = re.match(kind.opening, rest)
        if found is not None:
            key = kind.key_of(found["key"])
            self._begin(key, bool(found["text"]), bool(found["json"]), at + found.end())
        elif rest.startswith(kind.end):
            self._arguments, self._end = self._arguments + "}", at + len(kind.end)
        elif self._may_be_tag(rest) and len(text) - self._at < LONGEST_HEAD:
            return False
        else:  # the call ends without its end
            self._arguments, self._end = self._arguments + "}", self._at
        return True

    def _may_be_tag(self, rest: str) -> bool:
        marks = self._kind.end, self._kind.key[0]
        return rest.startswith(marks[1]) or any(each.startswith(rest) for each in marks)

    def _begin(self, key: str, is_text: bool, is_json: bool, at: int) -> None:
        self._parameter = parameter(self._tools[self._name], key)
        allowed = self._parameter.kinds
        self._is_string = allowed == STRING or (is_text and "string" in allowed)
        self._has_begun = False
        self._is_json = is_json or "string" not in allowed
        separator = "" if self._arguments == "{" else ", "
        self._arguments += f"{separator}{json.dumps(key, ensure_ascii=False)}: "
        self._arguments += '"' if self._is_string else ""
        self._at, self._searched, self._json = at, at, None

    def _begin_value(self, text: str) -> bool:
        """Past what a value begins with besides itself; False while that is to come."""
        kind = self._kind
        opening, closing = kind.section[0] or kind.padding, kind.value[1]
        if len(text) < self._at + len(opening) and opening.startswith(text[self._at :]):
            return False
        has_opening = text.startswith(opening, self._at)
        self._at += len(opening) if has_opening else 0
        self._searched = self._at
        self._closing = (kind.section[1] if has_opening else "") + closing
        self._has_begun = True
        return True

    def _read_string(self, text: str) -> bool:
        """A string is told as far as it is certain."""
        kind, closing = self._kind, self._closing
        end = text.find(closing, self._at)
        held = 0 if end >= 0 else unfinished_tag(text, (kind.padding + closing, closing))
        stop = max(self._at, len(text) - held) if end < 0 else end
        if end >= 0 and kind.padding and text.endswith(kind.padding, self._at, end):
            stop -= len(kind.padding)
        self._arguments += json.dumps(text[self._at : stop], ensure_ascii=False)[1:-1]
        self._at = stop
        if end >= 0:
            self._finish('"', end)
        return end >= 0

    def _read_other(self, text: str) -> bool:
        closing, padding = self._closing, self._kind.padding
        if not self._skip_json(text):
            return False
        end = text.find(closing, self._searched)
        if end < 0:
            self._searched = max(self._at, len(text) - len(closing) + 1)
            return False
        value = text[self._at : end]
        if padding:
            value = value.removesuffix(padding)
        assert self._parameter is not None
        self._finish(self._parameter.as_json(value), end)
        return True

    def _skip_json(self, text: str) -> bool:
        """Past the brackets of a list or an object, whose strings may hold what ends a value."""
        if self._json is None and self._is_json:
            begin = self._at + len(text[self._at :]) - len(text[self._at :].lstrip())
            if begin == len(text):
                return False
            self._json = Brackets(begin) if text[begin] in "[{" else None
        if self._json is None:
            return True
        found = self._json.read(text)
        self._searched = max(self._searched, found.end)
        return found.nesting is not Nesting.OPEN

    def _finish(self, told: str, end: int) -> None:
        self._arguments += told
        self._at, self._parameter = end + len(self._closing), None
