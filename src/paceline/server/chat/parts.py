"""What an answer consists of, in the order in which it was written: thoughts, words and calls.

Owns how parts follow each other, and a text that knows where its characters stood. Knows no
protocol but OpenAI's, whose form of a part is what the other protocols are made of.
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

Places = tuple[tuple[int, int], ...]
"""Stretches of the answer as it was generated, each from one character to before another."""


class Thoughts(NamedTuple):
    text: str


class Words(NamedTuple):
    """``places`` are where they stood, which tells what tokens they consist of."""

    text: str
    places: Places = ()


class CallOpening(NamedTuple):
    """A call begins: the answer's call ``number``, from 0 on."""

    number: int
    call_id: str
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the call that was opened last, as JSON."""

    number: int
    text: str


Part = Thoughts | Words | CallOpening | CallArguments


def opening(number: int, name: str) -> CallOpening:
    """The beginning of a call, with an id of its own."""
    return CallOpening(number, f"call_{secrets.token_hex(12)}", name)


def add(parts: list[Part], part: Part) -> None:
    """Tell a part after others: what follows something of its kind becomes one with it.

    A part without text, other than the opening of a call, is not told.
    """
    if isinstance(part, CallOpening):
        parts.append(part)
        return
    last = parts[-1] if parts else None
    if not part.text:
        return
    if isinstance(part, Words) and isinstance(last, Words):
        parts[-1] = Words(last.text + part.text, together(last.places, part.places))
    elif not isinstance(part, Words) and type(last) is type(part):
        parts[-1] = last._replace(text=last.text + part.text)
    else:
        parts.append(part)


def delta_of(part: Part) -> dict[str, Any]:
    """The part as the ``delta`` of a choice in OpenAI's chats."""
    if isinstance(part, Thoughts):
        return {"reasoning_content": part.text}
    if isinstance(part, Words):
        return {"content": part.text}
    if isinstance(part, CallArguments):
        return {"tool_calls": [{"index": part.number, "function": {"arguments": part.text}}]}
    function = {"name": part.name, "arguments": ""}
    begun = {"index": part.number, "id": part.call_id, "type": "function", "function": function}
    return {"tool_calls": [begun]}


class PlacedText:
    """A text that grows at its end and is taken from its beginning, with its places."""

    def __init__(self, text: str = "", start: int = 0) -> None:
        self.text = text
        self.places: Places = ((start, start + len(text)),) if text else ()

    def append(self, more: PlacedText) -> None:
        self.text += more.text
        self.places = together(self.places, more.places)

    def take(self, count: int) -> PlacedText:
        """Take the first characters off."""
        taken, rest = PlacedText(), count
        taken.text, self.text = self.text[:count], self.text[count:]
        before, after = list[tuple[int, int]](), list[tuple[int, int]]()
        for start, end in self.places:
            middle = min(start + rest, end)
            rest -= middle - start
            before += [(start, middle)] if start < middle else []
            after += [(middle, end)] if middle < end else []
        taken.places, self.places = tuple(before), tuple(after)
        return taken

    def take_all(self) -> PlacedText:
        return self.take(len(self.text))

    @property
    def words(self) -> Words:
        return Words(self.text, self.places)


def together(first: Places, second: Places) -> Places:
    """The places of a text that consists of two; they are one where the second goes on."""
    found = list[tuple[int, int]](first)
    for start, end in second:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return tuple(found)
