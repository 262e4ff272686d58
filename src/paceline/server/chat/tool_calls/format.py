"""What describes a format of tool calls: its marks, and how one call is read and forced.

Owns how far the beginning of a call may reach. Knows no format of a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from paceline.server.chat.tool_calls.tag_forms import Form

NAME = r"(?P<name>[\w.-]{1,64})"
"""Of a tool, in the pattern of a call's beginning."""
LONGEST_HEAD = 160
"""Characters within which what a call begins with must have come."""

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema]
"""The tools that were offered: name -> schema of the arguments."""


class ToolCall(NamedTuple):
    """A call as far as it is known; without a name it is none. ``arguments`` is JSON, and only
    grows. ``end`` is where what follows the call begins, None while that is to come.
    """

    name: str = ""
    arguments: str = ""
    end: int | None = 0


class CallReader(Protocol):
    """Reads the text behind what may have begun a call, as it grows."""

    def read(self, text: str) -> ToolCall | None:
        """The call that a text begins with; None while it cannot be told whether it is one."""
        ...


class ForcedCall(NamedTuple):
    """A tag of a call, and the keywords of its schema that the tag does not hold arguments to."""

    tag: Form
    unenforced: frozenset[str] = frozenset()


class CallSyntax(Protocol):
    """One way of writing a call."""

    def reader(self, tools: Tools) -> CallReader: ...

    def forced(self, name: str, schema: Schema) -> ForcedCall:
        """What a call of this tool is, where it is forced to match the schema."""
        ...


class Head(NamedTuple):
    """What a call begins with, up to ``end``; without a name it is none."""

    name: str = ""
    end: int = 0


def find_head(pattern: str, last: str, text: str) -> Head | None:
    """What a call begins with; None while that is to come.

    ``pattern`` has a group for the name, and ends with or before ``last``, a text whose first
    appearance decides.
    """
    if text.find(last, 0, LONGEST_HEAD) < 0:
        return None if len(text) < LONGEST_HEAD else Head()
    head = re.match(pattern, text)
    return Head(head["name"], head.end()) if head else Head()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: alone, or several of them between ``before`` and ``after``.

    Attributes:
        name: as users choose it.
        call: what one call is written like, where it is forced.
        other_call: what models write it like as well; None where they have one way.
        opening: strings that calls begin with, wherever they stand.
        inner: more of them, which the call itself is read with.
        closing: strings dropped directly after a call.
        start: the character that begins a call at the start of the answer; "" if none does.
        again: characters that begin a call directly after another one.
        separator: what stands between two calls.
    """

    name: str
    call: CallSyntax
    opening: tuple[str, ...]
    closing: tuple[str, ...]
    inner: tuple[str, ...] = ()
    start: str = ""
    again: str = ""
    before: str = ""
    after: str = ""
    separator: str = ""
    other_call: CallSyntax | None = None


LIST_END = (",", "]")
"""What may stand behind a call in a list."""
