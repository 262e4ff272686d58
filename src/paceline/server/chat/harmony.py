"""Harmony, the format of gpt-oss's answers: messages in channels, read while they arrive.

A message is ``<|start|>assistant<|channel|>NAME<|message|>``, its text, and a mark that ends it;
the prompt ends behind ``assistant``. What is in the channel ``analysis`` are thoughts, what has one
of the offered tools as its recipient (``to=functions.NAME``) is a call, and all else are words.
What is found does not depend on how the text is cut into pieces. Knows no grammar:
:mod:`paceline.server.chat.answer_requirements` writes one.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from dataclasses import dataclass

from paceline.server.chat.answer_parts import (
    CallArguments,
    Part,
    Places,
    ThoughtPlaces,
    Thoughts,
    Words,
    add,
    opening,
    together,
)
from paceline.text.detokenizer import unfinished_tag

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
ASSISTANT, FUNCTIONS = f"{START}assistant", "functions."
_ENDING = (END, "<|return|>", "<|call|>", START, CHANNEL)
_END = re.compile("|".join(map(re.escape, _ENDING)))
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADS = ("<|", "to=")
_GAP = "\n\n"  # between messages of one kind


@dataclass(frozen=True, slots=True)
class Harmony:
    """That a model answers in this format; ``begun`` is how the prompt begins its answer."""

    begun: str

    @classmethod
    def behind(cls, prompt: str) -> Harmony:
        """Of the answer to a prompt."""
        at = prompt.rfind(START)
        return cls(prompt[at:] if at >= 0 else "")


def words_of(answer: str) -> str:
    """The content of a whole answer in this format; all of one in another format."""
    if CHANNEL not in answer:
        return answer
    parts = HarmonyParser(Harmony(ASSISTANT)).push(answer, final=True)
    return "".join(part.text for part in parts if isinstance(part, Words))


class HarmonyPlace(enum.Enum):
    """What a text is a part of."""

    HEAD = enum.auto()  # of a message
    THOUGHTS = enum.auto()
    WORDS = enum.auto()
    CALL = enum.auto()


class HarmonyParser:
    """Reads one answer, with calls of tools of these names; calls beyond ``max_calls`` are dropped.

    Attributes:
        place: where the text that was read ends.
        has_start: the prompt has begun the head of a message.
        thoughts: where they stand; a message's head and end are their marks.
    """

    may_think = True  # any message may be thoughts

    def __init__(
        self, harmony: Harmony, names: Collection[str] = (), max_calls: int | None = None
    ) -> None:
        self._names, self._max_calls = frozenset(names), max_calls
        self.place, self._rest = HarmonyPlace.HEAD, ""
        self.thoughts = ThoughtPlaces()
        self._parts: list[Part] = []
        self._length = 0  # of the whole answer until now
        self._begin_at = 0  # where the message begins with its head
        self._is_fresh = True  # nothing of the message has been told
        self._told = set[HarmonyPlace]()  # of what there was a message before
        self._call = ""  # the name of the tool that the message is for
        self._num_calls = 0
        self.push(harmony.begun)
        self.has_start = self.place is HarmonyPlace.HEAD and START in self._rest
        self._rest = self._rest.removeprefix(ASSISTANT)
        self._told.clear()
        self._num_calls = self._length = self._begin_at = 0
        self.thoughts = ThoughtPlaces()

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str, final: bool = False) -> list[Part]:
        """Take the next piece; return the parts that became certain, in their order."""
        self._rest += text
        self._length += len(text)
        self._parts = []
        while self._read_head(final) if self.place is HarmonyPlace.HEAD else self._read_text(final):
            pass
        return self._parts

    def _read_head(self, final: bool) -> bool:
        """Up to a message's text; False when all that can be told has been."""
        begin = self._rest.lstrip()
        is_head = any(begin.startswith(head) for head in _HEADS)
        may_be = not final and any(head.startswith(begin) for head in _HEADS)
        if begin and not is_head and not may_be:  # words without a head
            self._begin(HarmonyPlace.WORDS)
            return True
        head, has_mark, rest = self._rest.partition(MESSAGE)
        if not has_mark:
            self._rest = "" if final else self._rest
            return False
        self._begin_at = self._at
        self._rest = rest
        self._begin(self._place_of(head.rpartition(START)[2]))
        return True

    def _place_of(self, head: str) -> HarmonyPlace:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._call = recipient[1].removeprefix(FUNCTIONS) if recipient else ""
        if self._call in self._names:
            return HarmonyPlace.CALL
        return HarmonyPlace.THOUGHTS if channel and channel[1] == "analysis" else HarmonyPlace.WORDS

    def _begin(self, place: HarmonyPlace) -> None:
        self.place, self._is_fresh = place, True

    def _read_text(self, final: bool) -> bool:
        """The text of a message up to its end; False when all that can be told has been."""
        if self.place is HarmonyPlace.CALL and self._is_fresh and not self._begin_call():
            return self.place is not HarmonyPlace.CALL
        end = _END.search(self._rest)
        held = 0 if final or end else unfinished_tag(self._rest, _ENDING)
        count = end.start() if end else len(self._rest) - held
        text, self._rest = self._rest[:count], self._rest[count:]
        self._tell(text)
        if end is None:
            return False
        if end[0] not in (START, CHANNEL):  # these begin the next message
            self._rest = self._rest[len(end[0]) :]
            self._note_thoughts(self._at, self._at)
        self.place = HarmonyPlace.HEAD
        return True

    def _begin_call(self) -> bool:
        """Whether a message is a call, which has an object as its arguments."""
        begin = self._rest.lstrip()
        if begin.startswith("{"):
            self._rest, self._num_calls = begin, self._num_calls + 1
            return True
        if begin:
            self.place = HarmonyPlace.WORDS
        return False

    def _tell(self, text: str) -> None:
        """More of a message's text, behind which is what has not been read."""
        if not text:
            return
        if self.place is HarmonyPlace.CALL:
            self._tell_call(text)
        else:
            gap = _GAP if self._is_fresh and self.place in self._told else ""
            self._told.add(self.place)
            places = ((self._at - len(text), self._at),)
            self._note_thoughts(*places[0])
            words = Words(gap + text, places)
            add(self._parts, words if self.place is HarmonyPlace.WORDS else Thoughts(words.text))
        self._is_fresh = False

    @property
    def _at(self) -> int:
        """Where what has not been read stands in the answer; 0 as long as that is the prompt's."""
        return max(0, self._length - len(self._rest))

    def _note_thoughts(self, start: int, end: int) -> None:
        """Let the places of thoughts grow, where the text from ``start`` to ``end`` is one."""
        if self.place is not HarmonyPlace.THOUGHTS:
            return
        inside: Places = ((start, end),) if start < end else ()
        before = tuple(each for each in self.thoughts.marked if each[1] <= self._begin_at)
        self.thoughts = ThoughtPlaces(
            together(self.thoughts.inside, inside), (*before, (self._begin_at, end))
        )

    def _tell_call(self, text: str) -> None:
        if self._max_calls is not None and self._num_calls > self._max_calls:
            return
        index = self._num_calls - 1
        if self._is_fresh:
            add(self._parts, opening(index, self._call))
        add(self._parts, CallArguments(index, text))
