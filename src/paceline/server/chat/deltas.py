"""What one piece of an answer's text adds to its message. Owns these types and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class CallDelta:
    """An addition to a tool call: with ``id`` and ``name`` it begins one, otherwise it goes on.

    ``arguments`` is the next part of the JSON text, as the model wrote it.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class AnswerDelta:
    """An addition to a message."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class ToolParser(Protocol):
    """Tells the tool calls of an answer from the words around them, while the text arrives.

    What is found does not depend on how the text is cut into pieces.
    """

    num_calls: int

    def push(self, text: str) -> AnswerDelta:
        """Take the next piece; return what became certain."""
        ...

    def finish(self) -> AnswerDelta:
        """What the text means if nothing follows."""
        ...


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
