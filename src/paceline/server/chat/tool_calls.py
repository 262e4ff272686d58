"""Tells tool calls from words while an answer arrives, in whatever format its model writes them.

Text is held back while it may begin a call, what proves to be none goes back to the words, and
white space beside calls is dropped. What is found does not depend on how the text is cut into
pieces. A tool that was not offered is no call. What a call looks like is a matter of
:mod:`paceline.server.chat.calls`; the formats are in :mod:`paceline.server.chat.tool_formats`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.server.chat.calls.format import ToolFormat
from paceline.server.chat.calls.kind import Call, Tools, unfinished_tag
from paceline.server.chat.parts import CallArguments, Part, PlacedText, add, opening


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that the model may call; ``strict`` calls match the schema of the arguments.

    ``unenforced`` are the keywords that were left out of the schema.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool = False
    unenforced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and whether the answer must call one of them.

    ``format`` is None where the answer is in Harmony, whose calls are messages.
    """

    format: ToolFormat | None
    tools: Sequence[OfferedTool]
    must_call: bool = False
    max_calls: int | None = None


class ToolCallReader:
    """Reads one answer.

    Args:
        tools: that were offered; other names make no call.
        max_calls: further calls are dropped.
    """

    def __init__(self, form: ToolFormat, tools: Tools, max_calls: int | None = None) -> None:
        self._form = form
        self._tools = tools
        self._max_calls = max_calls
        self._parts: list[Part] = []
        self._text = PlacedText()  # not told yet
        self._space = PlacedText()  # at the start and after a call: it counts only if words follow
        self._in_words = False
        self._opening: PlacedText | None = None  # what the call began with that the text may be
        self._call = self._form.call.reader(self._tools)
        self._told: int | None = None  # characters of its arguments; None until it is certain
        self.num_calls = 0

    def push(self, text: PlacedText, final: bool) -> list[Part]:
        """Take the next piece; return the words and the parts of calls that became certain."""
        self._text.append(text)
        self._parts = []
        while self._read_words(final) if self._opening is None else self._read_call(final):
            pass
        if final and not self.num_calls:
            add(self._parts, self._space.take_all().words)
        return self._parts

    def _read_words(self, final: bool) -> bool:
        """Up to where a call begins; False when all that can be told has been."""
        form = self._form
        begins = tags = form.opening + form.inner
        if not self._in_words:
            text = self._text.text
            rest = text.lstrip()
            self._space.append(self._text.take(len(text) - len(rest)))
            if self.num_calls:
                tags = begins + form.closing
                for tag in form.closing:
                    if rest.startswith(tag):
                        self._text.take(len(tag))
                        self._space.take_all()
                        return True
            if rest and rest[0] in (form.again if self.num_calls else form.start):
                self._begin("")
                return True
        text = self._text.text
        found = [(text.find(tag), tag) for tag in begins if tag in text]
        if found:
            start, tag = min(found)
            self._release(start)
            self._begin(tag)
            return True
        held = unfinished_tag(text, tags)
        if not final:
            self._release(len(text) - held)
        elif tags is begins or self._in_words or not _begins_one(text, form.closing):
            self._release(len(text))
        return False

    def _begin(self, tag: str) -> None:
        self._opening = self._text.take(len(tag))
        self._call = self._form.call.reader(self._tools)

    def _release(self, count: int) -> None:
        """So many characters of the text are words."""
        self._space.append(self._text.take(count))
        self._in_words = self._in_words or bool(self._space.text.strip())
        if self._in_words:
            add(self._parts, self._space.take_all().words)

    def _read_call(self, final: bool) -> bool:
        opening = self._opening
        assert opening is not None
        inner = opening.text if opening.text in self._form.inner else ""
        call = self._call.read(f"{inner}{self._text.text}")
        if call is None and not final:
            return False
        if call is None or not call.name:  # words after all
            self._space.append(opening)
            add(self._parts, self._space.take_all().words)
            self._in_words, self._opening = True, None
            return True
        if self._told is None:
            self.num_calls += 1
            self._in_words = False
            self._space.take_all()
        if self._max_calls is None or self.num_calls <= self._max_calls:
            self._tell(call)
        self._told = len(call.arguments)
        if call.end is None and not final:
            return False
        self._text.take(len(self._text.text) if call.end is None else call.end - len(inner))
        self._opening = self._told = None
        return True

    def _tell(self, call: Call) -> None:
        """What of a call has not been told."""
        index = self.num_calls - 1
        if self._told is None:
            add(self._parts, opening(index, call.name))
        add(self._parts, CallArguments(index, call.arguments[self._told or 0 :]))


def _begins_one(text: str, tags: Sequence[str]) -> bool:
    return any(tag.startswith(text) for tag in tags)
