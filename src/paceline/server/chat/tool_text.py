"""Tells JSON tool calls from the words around them, while the text of an answer arrives.

Owns what the formats share: text is held back while it may begin a call, what proves to be none
goes back to the words, and white space beside calls is dropped. What a call is lies in
:mod:`paceline.server.chat.json_call`; what surrounds it is told by the formats.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

from paceline.server.chat.deltas import AnswerDelta, CallDelta, unfinished_tag
from paceline.server.chat.json_call import CallReader


class JsonCallParser:
    """A :class:`~paceline.server.chat.deltas.ToolParser`.

    Args:
        names: of the tools that were offered; other names make no call.
        opening: strings that a call begins with, wherever they stand.
        closing: strings dropped directly after a call.
        bare: a brace begins a call too, at the start of the answer and directly after a call.
        max_calls: further calls are dropped.
    """

    def __init__(
        self,
        names: Collection[str],
        *,
        opening: tuple[str, ...],
        closing: tuple[str, ...],
        bare: bool,
        max_calls: int | None = None,
    ) -> None:
        self._names = frozenset(names)
        self._opening = opening
        self._closing = closing
        self._bare = bare
        self._max_calls = max_calls
        self._held = ""
        self._space = ""  # held at the start and after a call: it counts only if words follow
        self._in_words = False
        self._reader: CallReader | None = None
        self._began_with = ""
        self._is_announced = False
        self.num_calls = 0

    def push(self, text: str) -> AnswerDelta:
        delta = AnswerDelta()
        self._held += text
        self._read(delta)
        return delta

    def finish(self) -> AnswerDelta:
        delta = AnswerDelta()
        while self._reader is not None:
            self._tell(self._reader, self._reader.finish(), delta)
            self._leave(self._reader, delta)
            self._read(delta)
        if not self._is_closing():
            self._release(self._held, delta)
        if not self.num_calls:
            delta.content += self._space
        self._held = self._space = ""
        return delta

    def _read(self, delta: AnswerDelta) -> None:
        more = True
        while more:
            more = self._read_words(delta) if self._reader is None else self._read_call(delta)

    def _read_words(self, delta: AnswerDelta) -> bool:
        """Up to where a call begins; False when all that can be told has been."""
        tags = self._opening
        if not self._in_words:
            self._release(self._take_space(), delta)
            tags = tags + self._closing if self.num_calls else tags
            if self._drop_closing():
                return True
            if self._bare and self._held.startswith("{"):
                self._begin("")
                return True
        found = [(self._held.find(tag), tag) for tag in self._opening if tag in self._held]
        if found:
            start, tag = min(found)
            self._release(self._held[:start], delta)
            self._held = self._held[start + len(tag) :]
            self._begin(tag)
            return True
        certain = len(self._held) - unfinished_tag(self._held, tags)
        self._release(self._held[:certain], delta)
        self._held = self._held[certain:]
        return False

    def _take_space(self) -> str:
        words = self._held.lstrip()
        space, self._held = self._held[: len(self._held) - len(words)], words
        return space

    def _drop_closing(self) -> bool:
        for tag in self._closing if self.num_calls else ():
            if self._held.startswith(tag):
                self._held, self._space = self._held[len(tag) :], ""
                return True
        return False

    def _is_closing(self) -> bool:
        """Whether what is held is the beginning of what is dropped after a call."""
        after_call = bool(self.num_calls) and not self._in_words
        return after_call and any(tag.startswith(self._held) for tag in self._closing)

    def _begin(self, tag: str) -> None:
        self._reader = CallReader(self._names)
        self._began_with, self._is_announced = tag, False

    def _read_call(self, delta: AnswerDelta) -> bool:
        reader = self._reader
        assert reader is not None
        text, self._held = self._held, ""
        self._tell(reader, reader.push(text), delta)
        if reader.is_ended:
            self._leave(reader, delta)
        return reader.is_ended

    def _tell(self, reader: CallReader, arguments: str, delta: AnswerDelta) -> None:
        if not reader.is_call:
            return
        is_first = not self._is_announced
        if is_first:
            self._is_announced, self._in_words, self._space = True, False, ""
            self.num_calls += 1
        if self._max_calls is not None and self.num_calls > self._max_calls:
            return
        index = self.num_calls - 1
        if is_first:
            call_id = f"call_{secrets.token_hex(12)}"
            delta.calls.append(CallDelta(index, arguments, call_id, reader.name))
        elif arguments:
            delta.calls.append(CallDelta(index, arguments))

    def _leave(self, reader: CallReader, delta: AnswerDelta) -> None:
        self._held, self._reader = reader.rest, None
        if not reader.is_call:
            delta.content += self._space + self._began_with
            self._space, self._in_words = "", True

    def _release(self, words: str, delta: AnswerDelta) -> None:
        if not self._in_words:
            self._space += words
            if not self._space.strip():
                return
            words, self._space, self._in_words = self._space, "", True
        delta.content += words
