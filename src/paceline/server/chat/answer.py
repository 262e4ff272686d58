"""One sample's text as the parts of a message: reasoning, content, tool calls.

Owns the order: thoughts first, and tool calls only in what follows them.
"""

from __future__ import annotations

from paceline.server.chat.constraints import Thoughts, ToolUse
from paceline.server.chat.deltas import AnswerDelta, ToolParser
from paceline.server.chat.reasoning import ReasoningSplitter


class AnswerParser:
    """Reads one answer; whole or in pieces, the message is the same.

    Args:
        thoughts: whether it may begin with some.
        tool_use: the tools whose calls are recognised; None takes everything as words.
    """

    def __init__(self, thoughts: Thoughts, tool_use: ToolUse | None) -> None:
        self._splitter: ReasoningSplitter | None = None
        if thoughts is not Thoughts.NONE:
            self._splitter = ReasoningSplitter(thoughts is Thoughts.OPENED)
        self._tools: ToolParser | None = None
        # Where a call is forced there are no words; what looks like some is a call cut short.
        self._has_words = tool_use is None or not tool_use.must_call
        if tool_use is not None:
            names = [tool.name for tool in tool_use.tools]
            self._tools = tool_use.format.parser(names, tool_use.max_calls)

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str) -> AnswerDelta:
        """Take the next piece; return what became certain."""
        reasoning = ""
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text)
        if self._tools is None:
            return AnswerDelta(reasoning, text)
        delta = self._tools.push(text)
        return AnswerDelta(reasoning, delta.content if self._has_words else "", delta.calls)

    def finish(self) -> AnswerDelta:
        """The rest, when the text has ended."""
        reasoning, text = ("", "") if self._splitter is None else self._splitter.finish()
        if self._tools is None:
            return AnswerDelta(reasoning, text)
        first, last = self._tools.push(text), self._tools.finish()
        content = first.content + last.content if self._has_words else ""
        return AnswerDelta(reasoning, content, first.calls + last.calls)
