"""Takes off the marks that some models put around their answer, while the answer arrives.

White space beside the marks goes with them. A closing mark counts only where an opening one came.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from paceline.server.chat.calls.kind import unfinished_tag
from paceline.server.chat.parts import PlacedText


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The marks around an answer, and one behind all of it, calls included, if there is one."""

    opening: str
    closing: str
    tail: str = ""
    opened: bool = False


class _Place(enum.Enum):
    BEGIN = enum.auto()
    INSIDE = enum.auto()
    BARE = enum.auto()  # behind the closing mark, or there are no marks


class Unwrapper:
    """Reads one answer; whole or in pieces, what is left is the same."""

    def __init__(self, marks: Wrapping) -> None:
        self._marks = marks
        self._place = _Place.INSIDE if marks.opened else _Place.BEGIN
        self._text = PlacedText()  # not told yet
        self._is_padding = marks.opened  # white space that comes is dropped

    def push(self, text: PlacedText, final: bool) -> PlacedText:
        """Take the next piece; return what became certain."""
        self._text.append(text)
        told = PlacedText()
        if self._place is _Place.BEGIN and not self._opens(final):
            return told
        if self._place is _Place.INSIDE:
            told = self._inside(final)
        if self._place is _Place.BARE:
            told.append(self._bare(final))
        return told

    def _opens(self, final: bool) -> bool:
        """Whether it is certain if there are marks."""
        text, opening = self._text.text, self._marks.opening
        begin = text.lstrip()
        if begin.startswith(opening):
            self._text.take(len(text) - len(begin) + len(opening))
            self._place, self._is_padding = _Place.INSIDE, True
        elif final or not opening.startswith(begin):
            self._place = _Place.BARE
        return self._place is not _Place.BEGIN

    def _inside(self, final: bool) -> PlacedText:
        self._drop_padding()
        text = self._text.text
        marks = [mark for mark in (self._marks.closing, self._marks.tail) if mark]
        found = [(text.find(mark), mark) for mark in marks if mark in text]
        if found:
            end, mark = min(found)
            told = self._text.take(len(text[:end].rstrip()))
            self._text.take(end + len(mark) - len(told.text))
            self._place, self._is_padding = _Place.BARE, True
            return told
        if final:
            return self._text.take_all()
        certain = text[: len(text) - unfinished_tag(text, marks)]
        return self._text.take(len(certain.rstrip()))

    def _bare(self, final: bool) -> PlacedText:
        """Behind the closing mark: all but the tail."""
        self._drop_padding()
        text, tail = self._text.text, self._marks.tail
        if not tail:
            return self._text.take_all()
        before, found, _ = text.partition(tail)
        if not found:
            return self._text.take(len(text) - (0 if final else unfinished_tag(text, [tail])))
        told = self._text.take(len(before))
        self._text.take(len(tail))
        told.append(self._text.take_all())
        return told

    def _drop_padding(self) -> None:
        if self._is_padding:
            text = self._text.text
            self._text.take(len(text) - len(text.lstrip()))
            self._is_padding = not self._text.text
