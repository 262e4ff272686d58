"""Tells a model's thoughts, ``<think>...</think>``, from its answer while the text arrives.

Owns that one format. What is found does not depend on how the text is cut into pieces. White space
at both ends of the thoughts and before the answer is dropped: templates put it back.
"""

from __future__ import annotations

import enum

from paceline.server.chat.deltas import unfinished_tag

OPEN = "<think>"
CLOSE = "</think>"


class _Part(enum.Enum):
    START = enum.auto()  # it is not certain yet whether thoughts come
    THOUGHTS = enum.auto()
    GAP = enum.auto()  # white space between thoughts and answer
    ANSWER = enum.auto()


class ReasoningSplitter:
    """Splits one answer.

    Args:
        opened: the prompt ends inside of thoughts, because the template opened them. An opening tag
            that the model writes all the same is dropped.
    """

    def __init__(self, opened: bool) -> None:
        self._opened = opened
        self._part = _Part.START
        self._held = ""
        self._begun = False  # thoughts other than white space have been told

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece; return the thoughts and the answer that became certain."""
        if self._part is _Part.ANSWER:
            return "", text
        self._held += text
        reasoning = ""
        if self._part is _Part.START:
            self._leave_start()
        if self._part is _Part.THOUGHTS:
            reasoning = self._read_thoughts()
        if self._part is _Part.GAP:
            self._held = self._held.lstrip()
            if self._held:
                self._part = _Part.ANSWER
        return reasoning, self._take_answer()

    def finish(self) -> tuple[str, str]:
        """What was held back, if nothing follows."""
        if self._part is _Part.START:
            self._part = _Part.THOUGHTS if self._opened else _Part.ANSWER
        if self._part is _Part.THOUGHTS:
            rest, self._held = self._held.rstrip(), ""
            return (rest if self._begun else rest.lstrip()), ""
        return "", self._take_answer()

    def _leave_start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._part, self._held = _Part.THOUGHTS, text[len(OPEN) :]
        elif not OPEN.startswith(text):
            self._part = _Part.THOUGHTS if self._opened else _Part.ANSWER

    def _read_thoughts(self) -> str:
        text, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._part, self._held = _Part.GAP, rest
            certain = text.rstrip()
        else:
            certain = text[: len(text) - unfinished_tag(text, (CLOSE,))].rstrip()
            self._held = text[len(certain) :]
        if not self._begun:
            certain = certain.lstrip()
            self._begun = bool(certain)
        return certain

    def _take_answer(self) -> str:
        if self._part is not _Part.ANSWER:
            return ""
        text, self._held = self._held, ""
        return text
