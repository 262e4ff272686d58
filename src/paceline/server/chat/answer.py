"""One sample's text as the parts of a message: thoughts, words, tool calls.

Owns the order: thoughts first, between their marks, then what may stand between marks of its own,
and tool calls only in that. White space beside marks and calls is dropped: templates put it back.
Text is held back while it may begin a call, and what proves to be none goes back to the words. What
is found does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.request.structured_outputs import ThoughtMarks
from paceline.server.chat.answer_parts import (
    CallArguments,
    Part,
    PlacedText,
    ThoughtPlaces,
    Thoughts,
    Words,
    add,
    opening,
)
from paceline.server.chat.tool_calls.format import (
    CallReader,
    ToolCall,
    ToolFormat,
    Tools,
)
from paceline.server.chat.tool_calls.tag_forms import Form
from paceline.text.detokenizer import unfinished_tag


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
        told_parts = [answer.words] if self._tools is None else self._tools.push(answer, final)
        for part in told_parts:
            if self._has_words or not isinstance(part, Words):
                add(parts, part)
        return parts

    def _split(self, text: str, final: bool, marks: ThoughtMarks) -> tuple[str, str]:
        self._begin += text
        split = split_thoughts(self._begin, marks, final)
        if split is None:
            return "", ""
        self.thoughts = split.places
        more = split.thoughts[self._num_thought :]
        self._num_thought = len(split.thoughts)
        if split.answer:
            self._marks = None
        return more, split.answer


class Split(NamedTuple):
    """Thoughts, the answer behind them, and where thoughts stand."""

    thoughts: str
    answer: str
    places: ThoughtPlaces = ThoughtPlaces()


def split_thoughts(text: str, marks: ThoughtMarks, final: bool) -> Split | None:
    """Thoughts and answer, as far as they are certain; None where nothing is.

    ``text`` begins with the answer, and if it is ``final`` nothing follows. Where the prompt ends
    inside of thoughts, an opening mark that the model writes all the same is dropped.
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


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The marks around an answer, and one behind all of it, calls included, if there is one."""

    opening: str
    closing: str
    tail: str = ""
    opened: bool = False


class _WrappingPlace(enum.Enum):
    BEGIN = enum.auto()
    INSIDE = enum.auto()
    BARE = enum.auto()  # behind the closing mark, or there are no marks


class Unwrapper:
    """Reads one answer; whole or in pieces, what is left is the same."""

    def __init__(self, marks: Wrapping) -> None:
        self._marks = marks
        self._place = _WrappingPlace.INSIDE if marks.opened else _WrappingPlace.BEGIN
        self._text = PlacedText()  # not told yet
        self._is_padding = marks.opened  # white space that comes is dropped

    def push(self, text: PlacedText, final: bool) -> PlacedText:
        """Take the next piece; return what became certain."""
        self._text.append(text)
        certain = PlacedText()
        if self._place is _WrappingPlace.BEGIN and not self._opens(final):
            return certain
        closing, tail = self._marks.closing, self._marks.tail
        if self._place is _WrappingPlace.INSIDE:
            certain = self._up_to(list(filter(None, (closing, tail))), final, strips=True)
        length = -1
        while self._place is _WrappingPlace.BARE and len(self._text.text) != length:
            length = len(self._text.text)
            certain.append(self._up_to([tail] if tail else [], final, strips=False))
        return certain

    def _opens(self, final: bool) -> bool:
        """Whether it is certain if there are marks."""
        text, opening = self._text.text, self._marks.opening
        begin = text.lstrip()
        if begin.startswith(opening):
            self._text.take(len(text) - len(begin) + len(opening))
            self._place, self._is_padding = _WrappingPlace.INSIDE, True
        elif final or not opening.startswith(begin):
            self._place = _WrappingPlace.BARE
        return self._place is not _WrappingPlace.BEGIN

    def _up_to(self, marks: Sequence[str], final: bool, strips: bool) -> PlacedText:
        """What is certain before the first of the marks, which is dropped.

        Args:
            strips: so is the white space around it.
        """
        self._drop_padding()
        text = self._text.text
        places = [(text.find(mark), mark) for mark in marks if mark in text]
        if not places and final:
            return self._text.take_all()
        end, mark = min(places, default=(len(text) - unfinished_tag(text, marks), ""))
        before = self._text.take(len(text[:end].rstrip() if strips else text[:end]))
        if places:
            self._text.take(end + len(mark) - len(before.text))
            self._place, self._is_padding = _WrappingPlace.BARE, strips
        return before

    def _drop_padding(self) -> None:
        if self._is_padding:
            text = self._text.text
            self._text.take(len(text) - len(text.lstrip()))
            self._is_padding = not self._text.text


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that the model may call; ``strict`` calls match the schema of the arguments.

    Attributes:
        unenforced: the keywords that were left out of the schema.
        tag: of a call that matches the schema, where it is known already.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool = False
    unenforced: tuple[str, ...] = ()
    tag: Form | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and whether the answer must call one of them.

    ``format`` is None where the answer is in Harmony, whose calls are messages.
    """

    format: ToolFormat | None
    tools: Sequence[OfferedTool]
    must_call: bool = False
    max_calls: int | None = None


class ToolCallReader:
    """Reads one answer. Calls of tools that were not offered are words; calls beyond ``max_calls``
    are dropped.
    """

    def __init__(self, form: ToolFormat, tools: Tools, max_calls: int | None = None) -> None:
        self._form = form
        self._tools = tools
        self._max_calls = max_calls
        self._parts: list[Part] = []
        self._text = PlacedText()  # not told yet
        self._space = PlacedText()  # at the start and after a call: it counts only if words follow
        self._in_words = False
        self._opening: PlacedText | None = None  # what the call began with that the text may be
        self._readers: list[CallReader] = []  # of the ways in which the call may be written
        self._told: int | None = None  # characters of its arguments; None until it is certain
        self.num_calls = 0

    def push(self, text: PlacedText, final: bool) -> list[Part]:
        """Take the next piece; return the words and the parts of calls that became certain."""
        self._text.append(text)
        self._parts = []
        while self._read_words(final) if self._opening is None else self._read_call(final):
            pass
        if final and not self.num_calls:
            add(self._parts, self._space.take_all().words)
        return self._parts

    def _read_words(self, final: bool) -> bool:
        """Up to where a call begins; False when all that can be told has been."""
        form = self._form
        begins = tags = form.opening + form.inner
        if not self._in_words:
            text = self._text.text
            rest = text.lstrip()
            self._space.append(self._text.take(len(text) - len(rest)))
            if self.num_calls:
                tags = begins + form.closing
                for tag in form.closing:
                    if rest.startswith(tag):
                        self._text.take(len(tag))
                        self._space.take_all()
                        return True
            if rest and rest[0] in (form.again if self.num_calls else form.start):
                self._begin("")
                return True
        text = self._text.text
        places = [(text.find(tag), tag) for tag in begins if tag in text]
        if places:
            start, tag = min(places)
            self._release(start)
            self._begin(tag)
            return True
        held = unfinished_tag(text, tags)
        if not final:
            self._release(len(text) - held)
        elif tags is begins or self._in_words or not _begins_one(text, form.closing):
            self._release(len(text))
        return False

    def _begin(self, tag: str) -> None:
        self._opening = self._text.take(len(tag))
        syntaxes = filter(None, (self._form.other_call, self._form.call))
        self._readers = [syntax.reader(self._tools) for syntax in syntaxes]

    def _release(self, count: int) -> None:
        """The first ``count`` characters of the text are words."""
        self._space.append(self._text.take(count))
        self._in_words = self._in_words or bool(self._space.text.strip())
        if self._in_words:
            add(self._parts, self._space.take_all().words)

    def _read_call(self, final: bool) -> bool:
        opening = self._opening
        assert opening is not None
        inner = opening.text if opening.text in self._form.inner else ""
        call = self._call(f"{inner}{self._text.text}")
        if call is None and not final:
            return False
        if call is None or not call.name:  # words after all
            self._space.append(opening)
            add(self._parts, self._space.take_all().words)
            self._in_words, self._opening = True, None
            return True
        if self._told is None:
            self.num_calls += 1
            self._in_words = False
            self._space.take_all()
        if self._max_calls is None or self.num_calls <= self._max_calls:
            self._tell(call)
        self._told = len(call.arguments)
        if call.end is None and not final:
            return False
        self._text.take(len(self._text.text) if call.end is None else call.end - len(inner))
        self._opening = self._told = None
        return True

    def _call(self, text: str) -> ToolCall | None:
        """The call that a text begins with, read by the first reader for which it may be one."""
        while True:
            call = self._readers[0].read(text)
            if call is None or call.name or len(self._readers) == 1:
                return call
            del self._readers[0]

    def _tell(self, call: ToolCall) -> None:
        index = self.num_calls - 1
        if self._told is None:
            add(self._parts, opening(index, call.name))
        add(self._parts, CallArguments(index, call.arguments[self._told or 0 :]))


def _begins_one(text: str, tags: Sequence[str]) -> bool:
    return any(tag.startswith(text) for tag in tags)
