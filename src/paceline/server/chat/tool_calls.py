"""Tells tool calls, ``{"name": ..., "arguments": {...}}``, from words while an answer arrives.

Text is held back while it may begin a call, what proves to be none goes back to the words, and
white space beside calls is dropped. What is found does not depend on how the text is cut into
pieces. What surrounds calls is :mod:`paceline.server.chat.tool_formats`'.

As soon as the name and the start of the arguments are there, a call is certain and its arguments
are told as the model writes them: like OpenAI's, they may end early, or be no JSON, if the model
ends early or errs after that. A call with its members in another order is told when it is whole.
Anything else, such as a tool that was not offered, is no call.
"""

from __future__ import annotations

import enum
import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from paceline.server.chat.tool_formats import ToolFormat

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[\w.-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
_INSIDE_STRING = re.compile(r'"|\\(?=.)', re.DOTALL)


def unfinished_tag(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of ``text`` with which one of ``tags`` begins, short of all of it.

    >>> unfinished_tag("so <to", ["<tool_call>"])
    3
    """
    longest = max(len(tag) for tag in tags) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        end = text[start:]
        if any(len(end) < len(tag) and tag.startswith(end) for tag in tags):
            return len(end)
    return 0


class ToolCallReader:
    """Reads one answer.

    Args:
        names: of the tools that were offered; other names make no call.
        max_calls: further calls are dropped.
    """

    def __init__(
        self, form: ToolFormat, names: Collection[str], max_calls: int | None = None
    ) -> None:
        self._form = form
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._text = ""  # not told yet
        self._space = ""  # held at the start and after a call: it counts only if words follow
        self._in_words = False
        self._tag: str | None = None  # what the call began with that the text may be
        self._call = _CallText(self._names)
        self._told: int | None = None  # characters of its arguments; None until it is certain
        self.num_calls = 0

    def push(self, text: str, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """Take the next piece; return the words and the parts of calls that became certain.

        A part of a call is as OpenAI's streams have it: with ``id`` and name it begins one,
        otherwise it goes on.

        Args:
            final: nothing follows.
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
        form, tags = self._form, self._form.opening
        if not self._in_words:
            rest = self._text.lstrip()
            self._space += self._text[: len(self._text) - len(rest)]
            self._text = rest
            if self.num_calls:
                tags += form.closing
                for tag in form.closing:
                    if rest.startswith(tag):
                        self._text, self._space = rest[len(tag) :], ""
                        return True
            if form.bare and rest.startswith("{"):
                self._begin("")
                return True
        found = [(self._text.find(tag), tag) for tag in form.opening if tag in self._text]
        if found:
            start, tag = min(found)
            self._release(words, start)
            self._text = self._text[len(tag) :]
            self._begin(tag)
            return True
        held = unfinished_tag(self._text, tags)
        if not final:
            self._release(words, len(self._text) - held)
        elif self._in_words or not any(tag.startswith(self._text) for tag in tags[1:]):
            self._release(words, len(self._text))
        return False

    def _begin(self, tag: str) -> None:
        self._tag, self._call = tag, _CallText(self._names)

    def _release(self, words: list[str], count: int) -> None:
        """So many characters of the text are words."""
        found, self._text = self._space + self._text[:count], self._text[count:]
        self._in_words = self._in_words or bool(found.strip())
        self._space = "" if self._in_words else found
        words.append(found if self._in_words else "")

    def _read_call(self, words: list[str], calls: list[dict[str, Any]], final: bool) -> bool:
        call = self._call.read(self._text)
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
        self._text = "" if call.end is None else self._text[call.end :]
        self._tag = self._told = None
        return True

    def _part(self, call: _Call) -> list[dict[str, Any]]:
        """What of a call has not been told."""
        index = self.num_calls - 1
        if self._told is None:
            function = {"name": call.name, "arguments": call.arguments}
            call_id = f"call_{secrets.token_hex(12)}"
            return [{"index": index, "id": call_id, "type": "function", "function": function}]
        more = call.arguments[self._told :]
        return [{"index": index, "function": {"arguments": more}}] if more else []


class _Call(NamedTuple):
    """A call as far as it is known; without a name it is none.

    ``end`` is where what follows it begins, None while that is to come.
    """

    name: str = ""
    arguments: str = ""
    end: int | None = 0


class _Nesting(enum.Enum):
    OPEN = enum.auto()
    CLOSED = enum.auto()
    BROKEN = enum.auto()  # by a ``<`` outside of strings: there a tag begins


class _Brackets:
    """Where the brackets from a place of a text on are closed again or broken, or the text ends.

    A text that has grown is read on from where it ended.
    """

    def __init__(self, start: int) -> None:
        self.end = start
        self.nesting = _Nesting.OPEN
        self._depth = 0
        self._in_string = False

    def read(self, text: str) -> _Brackets:
        while self.nesting is _Nesting.OPEN:
            pattern = _INSIDE_STRING if self._in_string else _OUTSIDE_STRING
            found = pattern.search(text, self.end)
            if found is None:
                ends_escaping = self.end < len(text) and self._in_string and text[-1] == "\\"
                self.end = len(text) - ends_escaping
                break
            self.end = found.end()
            if found[0] == "\\":
                self.end += 1
            elif found[0] == '"':
                self._in_string = not self._in_string
            elif found[0] == "<":
                self.end, self.nesting = found.start(), _Nesting.BROKEN
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth <= 0:
                    self.nesting = _Nesting.CLOSED
        return self


class _CallText:
    """The text after what may have begun a call, as it grows."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._brackets: dict[int, _Brackets] = {}

    def read(self, text: str) -> _Call | None:
        """The call that a text begins with; None while it cannot be told whether it is one."""
        begin = len(text) - len(text.lstrip())
        head = _HEAD.match(text)
        if head is not None and head["name"] in self._names:
            found = arguments = self._nested(text, head.end())
            if found.nesting is _Nesting.CLOSED:  # other members may follow
                found = self._nested(text, begin)
            end = None if found.nesting is _Nesting.OPEN else found.end
            told = len(text) if arguments.nesting is _Nesting.OPEN else arguments.end
            return _Call(head["name"], text[head.end() : told], end)
        if text[begin : begin + 1] not in ("", "{"):
            return _Call()
        whole = self._nested(text, begin)
        if whole.nesting is _Nesting.CLOSED:
            return _Call(*_parsed(text[: whole.end], self._names), whole.end)
        return None if whole.nesting is _Nesting.OPEN else _Call()

    def _nested(self, text: str, start: int) -> _Brackets:
        return self._brackets.setdefault(start, _Brackets(start)).read(text)


def _parsed(text: str, names: Collection[str]) -> tuple[str, str]:
    """Name and arguments of a whole call; no name if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return "", ""
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return "", ""
    return name, json.dumps(arguments, ensure_ascii=False)
