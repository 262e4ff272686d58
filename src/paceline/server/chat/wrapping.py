"""Takes off the marks that some models put around their answer, while the answer arrives.

White space beside the marks goes with them. A closing mark counts only where an opening one came.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from paceline.server.chat.calls.kind import unfinished_tag


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The marks around an answer."""

    opening: str
    closing: str
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
        self._text = ""  # not told yet
        self._is_padding = marks.opened  # white space that comes is dropped

    def push(self, text: str, final: bool) -> str:
        """Take the next piece; return what became certain."""
        self._text += text
        told = ""
        if self._place is _Place.BEGIN and not self._opens(final):
            return ""
        if self._place is _Place.INSIDE:
            told = self._inside(final)
        if self._place is _Place.BARE:
            self._drop_padding()
            told, self._text = told + self._text, ""
        return told

    def _opens(self, final: bool) -> bool:
        """Whether it is certain if there are marks."""
        begin, opening = self._text.lstrip(), self._marks.opening
        if begin.startswith(opening):
            self._text = begin.removeprefix(opening)
            self._place, self._is_padding = _Place.INSIDE, True
        elif final or not opening.startswith(begin):
            self._place = _Place.BARE
        return self._place is not _Place.BEGIN

    def _inside(self, final: bool) -> str:
        self._drop_padding()
        before, found, behind = self._text.partition(self._marks.closing)
        if found:
            self._text, self._place, self._is_padding = behind, _Place.BARE, True
            return before.rstrip()
        end = len(self._text)
        if not final:
            end = len(
                self._text[: end - unfinished_tag(self._text, [self._marks.closing])].rstrip()
            )
        told, self._text = self._text[:end], self._text[end:]
        return told

    def _drop_padding(self) -> None:
        if self._is_padding:
            self._text = self._text.lstrip()
            self._is_padding = not self._text
