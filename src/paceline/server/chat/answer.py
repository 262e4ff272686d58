"""One sample's text as the parts of a message: reasoning, content, tool calls.

Owns the order: thoughts first, ``<think>...</think>``, and tool calls only in what follows them.
White space at both ends of the thoughts and before the answer is dropped: templates put it back.
"""

from __future__ import annotations

from typing import Any

from paceline.server.chat.constraints import Thoughts, ToolUse
from paceline.server.chat.tool_calls import ToolCallReader, unfinished_tag

OPEN = "<think>"
CLOSE = "</think>"


class AnswerParser:
    """Reads one answer; whole or in pieces, the message is the same.

    Args:
        thoughts: whether it may begin with some.
        tool_use: the tools whose calls are recognised; None takes everything as words.
    """

    def __init__(self, thoughts: Thoughts, tool_use: ToolUse | None) -> None:
        self._opened = thoughts is Thoughts.OPENED
        self._may_think = thoughts is not Thoughts.NONE
        self._begin = ""  # the text, while it may be thoughts
        self._num_thought = 0  # characters of thoughts that have been told
        self._tools: ToolCallReader | None = None
        # Where a call is forced there are no words; what looks like some is a call cut short.
        self._has_words = tool_use is None or not tool_use.must_call
        if tool_use is not None:
            names = [tool.name for tool in tool_use.tools]
            self._tools = ToolCallReader(tool_use.format, names, tool_use.max_calls)

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str, final: bool = False) -> dict[str, Any]:
        """Take the next piece; return what became certain, as the ``delta`` of a choice.

        Args:
            final: nothing follows.
        """
        thoughts, text = self._split(text, final) if self._may_think else ("", text)
        calls = list[dict[str, Any]]()
        if self._tools is not None:
            text, calls = self._tools.push(text, final)
        content = text if self._has_words else ""
        told = {"reasoning_content": thoughts, "content": content, "tool_calls": calls}
        return {name: value for name, value in told.items() if value}

    def _split(self, text: str, final: bool) -> tuple[str, str]:
        """What is certain of the thoughts, and of what follows them."""
        self._begin += text
        found = split_thoughts(self._begin, self._opened, final)
        if found is None:
            return "", ""
        thoughts, answer = found
        more = thoughts[self._num_thought :]
        self._num_thought = len(thoughts)
        self._may_think = not answer
        return more, answer


def split_thoughts(text: str, opened: bool, final: bool) -> tuple[str, str] | None:
    """Thoughts and answer, as far as they are certain; None where nothing is.

    Args:
        text: from the answer's beginning on.
        opened: the prompt ends inside of thoughts, because the template opened them. An opening tag
            that the model writes all the same is dropped.
        final: nothing follows.
    """
    begin = text.lstrip()
    if begin.startswith(OPEN):
        text = begin.removeprefix(OPEN)
    elif OPEN.startswith(begin) and not final:
        return None
    elif not opened:
        return "", text
    thoughts, tag, answer = text.partition(CLOSE)
    if not tag and not final:
        thoughts = thoughts[: len(thoughts) - unfinished_tag(thoughts, (CLOSE,))]
    return thoughts.strip(), answer.lstrip()
