"""What the parts of an answer add up to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.server.chat.answer_parts import CallArguments, CallOpening, Part, Thoughts, Words

Told = list[tuple[str, str]]


def in_order(parts: Iterable[Part]) -> Told:
    """What follows what, in whatever pieces it was told; ids of calls are drawn, so not they."""
    found: Told = []
    for part in parts:
        if isinstance(part, CallOpening):
            assert part.call_id
            found.append((f"call {part.number} {part.name}", ""))
            continue
        kind = type(part).__name__
        if isinstance(part, CallArguments):
            kind = found[-1][0]
            assert kind.startswith(f"call {part.number} ")
        before = found.pop()[1] if found and found[-1][0] == kind else ""
        found.append((kind, before + part.text))
    return found


def added_up(parts: Iterable[Part]) -> tuple[str, str, list[Any]]:
    """Thoughts, words, and calls as names with arguments."""
    told = in_order(parts)
    calls = [(kind.split(maxsplit=2)[2], text) for kind, text in told if kind.startswith("call ")]
    thoughts, words = (
        "".join(text for kind, text in told if kind == name.__name__) for name in (Thoughts, Words)
    )
    assert [kind.split()[1] for kind, _ in told if kind.startswith("call ")] == [
        str(number) for number in range(len(calls))
    ]
    return thoughts, words, calls
