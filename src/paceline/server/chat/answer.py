"""One sample's text as the parts of a message: thoughts, words, tool calls.

Owns the order: thoughts first, between their marks, and tool calls only in what follows them.
White space at both ends of the thoughts and before the answer is dropped: templates put it back.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.request.structured_outputs import ThoughtMarks
from paceline.server.chat.calls.kind import unfinished_tag
from paceline.server.chat.parts import Part, PlacedText, Thoughts, Words, add
from paceline.server.chat.thought_tokens import ThoughtPlaces
from paceline.server.chat.tool_calls import ToolCallReader, ToolUse
from paceline.server.chat.wrapping import Unwrapper, Wrapping


class AnswerParser:
    """Reads one answer; whole or in pieces, the message is the same.

    Args:
        thoughts: the marks of those that it may begin with; None where there are none.
        tool_use: the tools whose calls are recognised; None takes everything as words.
        wrapping: marks around what follows the thoughts; None where there are none.
        shows_thoughts: they and their marks are told as words, and still known to be thoughts.

    Attributes:
        thoughts: where they stand.
    """

    def __init__(
        self,
        thoughts: ThoughtMarks | None,
        tool_use: ToolUse | None,
        wrapping: Wrapping | None = None,
        shows_thoughts: bool = False,
    ) -> None:
        self._shows_thoughts = shows_thoughts
        self._unwrapper = None if wrapping is None else Unwrapper(wrapping)
        self.thoughts = ThoughtPlaces()
        self._marks = thoughts  # None as soon as there can be no more of them
        self._length = 0  # of the whole answer until now
        self._begin = ""  # the text, while it may be thoughts
        self._num_thought = 0  # characters of thoughts that have been told
        self._tools: ToolCallReader | None = None
        # Where a call is forced there are no words; what looks like some is a call cut short.
        self._has_words = tool_use is None or not tool_use.must_call
        if tool_use is not None and tool_use.format is not None:
            tools = {tool.name: tool.schema for tool in tool_use.tools}
            self._tools = ToolCallReader(tool_use.format, tools, tool_use.max_calls)

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def may_think(self) -> bool:
        """Whether there can be more thoughts."""
        return self._marks is not None

    def push(self, text: str, final: bool = False) -> list[Part]:
        """Take the next piece; return the parts that became certain, in their order."""
        self._length += len(text)
        thoughts, rest = self._split(text, final, self._marks) if self._marks else ("", text)
        if self._shows_thoughts:
            thoughts, rest = "", text
        parts = list[Part]()
        add(parts, Thoughts(thoughts))
        answer = PlacedText(rest, self._length - len(rest))  # the answer is what comes last
        if self._unwrapper is not None:
            answer = self._unwrapper.push(answer, final)
        told = [answer.words] if self._tools is None else self._tools.push(answer, final)
        for part in told:
            if self._has_words or not isinstance(part, Words):
                add(parts, part)
        return parts

    def _split(self, text: str, final: bool, marks: ThoughtMarks) -> tuple[str, str]:
        """What is certain of the thoughts, and of what follows them."""
        self._begin += text
        found = split_thoughts(self._begin, marks, final)
        if found is None:
            return "", ""
        self.thoughts = found.places
        more = found.thoughts[self._num_thought :]
        self._num_thought = len(found.thoughts)
        if found.answer:
            self._marks = None
        return more, found.answer


class Split(NamedTuple):
    """Thoughts, the answer behind them, and where thoughts stand."""

    thoughts: str
    answer: str
    places: ThoughtPlaces = ThoughtPlaces()


def split_thoughts(text: str, marks: ThoughtMarks, final: bool) -> Split | None:
    """Thoughts and answer, as far as they are certain; None where nothing is.

    Args:
        text: from the answer's beginning on.
        marks: if the prompt ends inside of thoughts, because the template opened them, an opening
            mark that the model writes all the same is dropped.
        final: nothing follows.
    """
    begin, at = text.lstrip(), len(text) - len(text.lstrip())
    opening = next((mark for mark in marks.opening if begin.startswith(mark)), None)
    if opening is not None:
        start = at + len(opening)
    elif not final and any(mark.startswith(begin) for mark in marks.opening):
        return None
    elif not marks.opened:
        return Split("", text)
    else:
        start = 0
    marked = 0 if marks.opened else at  # where the thoughts begin with their mark
    ends = [(text.find(mark, start), mark) for mark in marks.closing if text.find(mark, start) >= 0]
    if ends:
        stop, closing = min(ends)
        end = stop + len(closing)
    else:
        stop = end = len(text) - (0 if final else unfinished_tag(text[start:], marks.closing))
    places = ThoughtPlaces(((start, stop),), ((marked, end),))
    return Split(text[start:stop].strip(), text[end:].lstrip() if ends else "", places)
