"""Reads a tool call written as JSON, ``{"name": ..., "arguments": {...}}``, while it arrives.

Owns the shape of one call; what surrounds calls is the formats'. As soon as the name and the start
of the arguments are there, the call is certain and its arguments are told as the model writes them:
like OpenAI's, they may end early, or be no JSON, if the model ends early or errs after that. A call
with its members in another order is told when it is whole. Anything else, such as a tool that was
not offered, is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[\w.-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
_INSIDE_STRING = re.compile(r'["\\]')


class _Brackets:
    """How deep a JSON text nests. A ``<`` outside of strings breaks it: there a tag begins."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_broken = False
        self._in_string = False

    def scan(self, text: str, start: int, floor: int) -> int:
        """Read on until the depth falls to ``floor``, a break or the end; return where that is."""
        while start < len(text):
            found = (_INSIDE_STRING if self._in_string else _OUTSIDE_STRING).search(text, start)
            if found is None:
                return len(text)
            mark, start = found[0], found.end()
            if mark == "\\":
                if start == len(text):
                    return found.start()  # what it escapes is still to come
                start += 1
            elif mark == '"':
                self._in_string = not self._in_string
            elif mark == "<":
                self.is_broken = True
                return found.start()
            elif mark in "{[":
                self.depth += 1
            else:
                self.depth -= 1
                if self.depth <= floor:
                    return start
        return start


class CallReader:
    """Reads one call from its opening brace, or white space before it, on.

    Attributes:
        name: of the tool, once it is certain that this is a call.
        is_ended: nothing more of what is pushed belongs to it.
        rest: once ended, what follows the call; of what proved to be no call, everything.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._brackets = _Brackets()
        self._text = ""
        self._position = 0  # of the scan in the text
        self._in_arguments = False
        self.name: str | None = None
        self.is_ended = False
        self.rest = ""

    @property
    def is_call(self) -> bool:
        return self.name is not None

    def push(self, text: str) -> str:
        """Take the next piece, return what it adds to the arguments."""
        self._text += text
        if not self.is_call:
            self._read_head()
        if not self.is_call:
            return self._read_whole()
        arguments = self._read_arguments() if self._in_arguments else ""
        if not self._in_arguments and not self.is_ended:
            self._read_tail()
        return arguments

    def finish(self) -> str:
        """What the arguments end with if nothing follows."""
        rest, self._text = self._text, ""
        if not self.is_ended and not self.is_call:
            self.rest = rest
        self.is_ended = True
        return rest if self._in_arguments else ""

    def _read_head(self) -> None:
        head = _HEAD.match(self._text)
        if head is not None and head["name"] in self._names:
            self.name = head["name"]
            self._text = self._text[head.end() :]
            self._position = 0
            self._brackets = _Brackets()
            self._brackets.depth = 1  # inside of the call itself
            self._in_arguments = True

    def _read_whole(self) -> str:
        """Until it can be decided by the whole object; its arguments if it is a call."""
        if self._text.lstrip()[:1] not in ("", "{"):
            self._end(0)
            return ""
        self._position = self._brackets.scan(self._text, self._position, floor=0)
        if self._brackets.is_broken:
            self._end(0)
        elif self._brackets.depth == 0 and self._position and self._text.lstrip():
            self.name, arguments = _parsed(self._text[: self._position], self._names)
            self._end(self._position if self.is_call else 0)
            return arguments
        return ""

    def _read_arguments(self) -> str:
        end = self._brackets.scan(self._text, self._position, floor=1)
        arguments, self._text, self._position = self._text[:end], self._text[end:], 0
        if self._brackets.is_broken:
            self._in_arguments = False
            self._end(0)
        elif self._brackets.depth == 1:
            self._in_arguments = False
        return arguments

    def _read_tail(self) -> None:
        """Past members that follow the arguments, to the call's own closing brace."""
        end = self._brackets.scan(self._text, 0, floor=0)
        if self._brackets.is_broken or self._brackets.depth <= 0:
            self._end(end)
        else:
            self._text = self._text[end:]

    def _end(self, position: int) -> None:
        self.rest, self._text = self._text[position:], ""
        self.is_ended = True


def _parsed(text: str, names: Collection[str]) -> tuple[str | None, str]:
    """Name and arguments of a whole call; no name if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None, ""
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None, ""
    return name, json.dumps(arguments, ensure_ascii=False)
