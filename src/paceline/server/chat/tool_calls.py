"""Tells tool calls from words while an answer arrives, in whatever format its model writes them.

Text is held back while it may begin a call, what proves to be none goes back to the words, and
white space beside calls is dropped. What is found does not depend on how the text is cut into
pieces. A tool that was not offered is no call. What a call looks like is a matter of
:mod:`paceline.server.chat.calls`; the formats are in :mod:`paceline.server.chat.tool_formats`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from paceline.server.chat.calls.format import ToolFormat
from paceline.server.chat.calls.kind import Call, Tools, unfinished_tag


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
        self._text = ""  # not told yet
        self._space = ""  # held at the start and after a call: it counts only if words follow
        self._in_words = False
        self._tag: str | None = None  # what the call began with that the text may be
        self._call = self._form.call.reader(self._tools)
        self._told: int | None = None  # characters of its arguments; None until it is certain
        self.num_calls = 0

    def push(self, text: str, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """Take the next piece; return the words and the parts of calls that became certain.

        A part of a call is as OpenAI's streams have it: with ``id`` and name it begins one,
        otherwise it goes on.
        """
        self._text += text
        words, calls = list[str](), list[dict[str, Any]]()
        goes_on = True
        while goes_on:
            if self._tag is None:
                goes_on = self._read_words(words, final)
            else:
                goes_on = self._read_call(words, calls, final)
        if final and not self.num_calls:
            words.append(self._space)
        return "".join(words), calls

    def _read_words(self, words: list[str], final: bool) -> bool:
        """Up to where a call begins; False when all that can be told has been."""
        form = self._form
        begins = tags = form.opening + form.inner
        if not self._in_words:
            rest = self._text.lstrip()
            self._space += self._text[: len(self._text) - len(rest)]
            self._text = rest
            if self.num_calls:
                tags = begins + form.closing
                for tag in form.closing:
                    if rest.startswith(tag):
                        self._text, self._space = rest[len(tag) :], ""
                        return True
            if rest and rest[0] in (form.again if self.num_calls else form.start):
                self._begin("")
                return True
        found = [(self._text.find(tag), tag) for tag in begins if tag in self._text]
        if found:
            start, tag = min(found)
            self._release(words, start)
            self._text = self._text[len(tag) :]
            self._begin(tag)
            return True
        held = unfinished_tag(self._text, tags)
        if not final:
            self._release(words, len(self._text) - held)
        elif tags is begins or self._in_words or not _begins_one(self._text, form.closing):
            self._release(words, len(self._text))
        return False

    def _begin(self, tag: str) -> None:
        self._tag, self._call = tag, self._form.call.reader(self._tools)

    def _release(self, words: list[str], count: int) -> None:
        """So many characters of the text are words."""
        found, self._text = self._space + self._text[:count], self._text[count:]
        self._in_words = self._in_words or bool(found.strip())
        self._space = "" if self._in_words else found
        words.append(found if self._in_words else "")

    def _read_call(self, words: list[str], calls: list[dict[str, Any]], final: bool) -> bool:
        inner = self._tag if self._tag in self._form.inner else ""
        call = self._call.read(f"{inner}{self._text}")
        if call is None and not final:
            return False
        if call is None or not call.name:  # words after all
            words.append(f"{self._space}{self._tag}")
            self._space, self._in_words, self._tag = "", True, None
            return True
        if self._told is None:
            self.num_calls += 1
            self._in_words, self._space = False, ""
        if self._max_calls is None or self.num_calls <= self._max_calls:
            calls += self._part(call)
        self._told = len(call.arguments)
        if call.end is None and not final:
            return False
        self._text = "" if call.end is None else self._text[call.end - len(inner) :]
        self._tag = self._told = None
        return True

    def _part(self, call: Call) -> list[dict[str, Any]]:
        """What of a call has not been told."""
        index = self.num_calls - 1
        if self._told is None:
            function = {"name": call.name, "arguments": call.arguments}
            call_id = f"call_{secrets.token_hex(12)}"
            return [{"index": index, "id": call_id, "type": "function", "function": function}]
        more = call.arguments[self._told :]
        return [{"index": index, "function": {"arguments": more}}] if more else []


def _begins_one(text: str, tags: Sequence[str]) -> bool:
    return any(tag.startswith(text) for tag in tags)
