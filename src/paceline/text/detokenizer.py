"""Text of one request while its tokens arrive: whole characters only, stop strings recognised.

:class:`TextStream` is the stop checker that the engine is handed. It knows the tokenizer and not
the engine. The concatenation of all released text is what decoding prompt and output together adds
to the text of the prompt, whatever the order and grouping of calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import AnyStr

from paceline.text.tokenizer import REPLACEMENT, Tokenizer

# Tokens of context: enough for a token's leading space to be kept, and for a decoder of bytes to
# find the start of the next character (at most three bytes away) if the context begins inside one.
_CONTEXT = 6
_MAX_WINDOW = 12
_MAX_PROMPT_SCAN = 512


class TextStream:
    """Text of one output, released as soon as it is certain and cannot begin a stop string.

    Args:
        tokenizer: of the model that emits the tokens.
        prompt_token_ids: what precedes them; the first token's leading space depends on it.
        stop: strings that end the text. Which one ends it does not depend on how the text was cut
            into tokens: the one that is complete first, and the longest of several. Special tokens
            are no text, but where a stop string spells one out, it stands for the token; for the
            other stop strings that token is no text either.
        include_stop: keep the stop string in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt_token_ids)
        self._stop = tuple(string for string in stop if string)
        self._include_stop = include_stop
        self._marks = dict[int, str]()  # special tokens that stop strings spell out
        self._views = dict[frozenset[str], list[str]]()  # stop strings by what they spell out
        for string in self._stop:
            marks = tokenizer.special_tokens_in(string)
            self._marks |= marks
            self._views.setdefault(frozenset(marks.values()), []).append(string)
        self._pending: list[int] = []  # not decoded yet, where no stop string can end the text
        self._held = ""  # certain, but it may begin a stop string
        self._hidden: list[tuple[int, int, str]] = []  # stretches of it that are special tokens
        self._released: list[str] = []
        self._num_taken = 0  # entries of _released
        self._ended = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Take one token; return the stop string that it completed, if any and if it may."""
        if self._ended:
            return None
        self._pending.append(token_id)
        if not self._stop:
            return None
        self._decode()
        mark = self._marks.get(token_id, "")
        if mark:
            self._hidden.append((len(self._held), len(self._held) + len(mark), mark))
            self._held += mark
        if not may_stop:
            self._release(len(self._held))
            return None
        views = [(self._view(marks), stops) for marks, stops in self._views.items()]
        ends = [each for view, stops in views for each in view.complete(stops)]
        if not ends:
            self._release(min(view.certain(stops) for view, stops in views))
            return None
        _, start, string = min(ends)
        self._release(start)
        if self._include_stop:
            self._released.append(string)
        self._ended = True
        return string

    def take_text(self, *, final: bool) -> str:
        """Text that became certain since the last call; with ``final`` also what was held back."""
        self._decode_pending()
        if final and not self._ended:
            self._held += self._decoder.flush()
            self._release(len(self._held))
            self._ended = True
        taken = "".join(self._released[self._num_taken :])
        self._num_taken = len(self._released)
        return taken

    def _view(self, marks: frozenset[str]) -> _View:
        """What is held, with these special tokens alone."""
        return _View(self._held, [(a, b) for a, b, mark in self._hidden if mark not in marks])

    def _decode(self) -> None:
        self._held += self._decoder.push(*self._pending)
        self._pending.clear()

    def _decode_pending(self) -> None:
        """Decode together what was pushed since the last time; that is cheaper than one by one."""
        if self._pending:
            self._decode()
            self._release(len(self._held))

    def _release(self, count: int) -> None:
        """Release the first ``count`` characters, without those of special tokens."""
        if not count:
            return
        at, shown = 0, ""
        for start, end, _ in self._hidden:
            shown += self._held[at : min(start, count)]
            at = min(end, count)
        self._released.append(shown + self._held[at:count])
        self._held = self._held[count:]
        self._hidden = [
            (max(0, start - count), end - count, mark)
            for start, end, mark in self._hidden
            if end > count
        ]

    @property
    def text(self) -> str:
        """All text that has been released, taken or not."""
        self._decode_pending()
        return "".join(self._released)


class _View:
    """A text without some of its stretches; places are told as those of the whole text."""

    def __init__(self, text: str, left_out: Sequence[tuple[int, int]]) -> None:
        self._length, self._left_out = len(text), left_out
        for start, end in reversed(left_out):
            text = text[:start] + text[end:]
        self._text = text

    def complete(self, stops: Sequence[str]) -> Iterator[tuple[int, int, str]]:
        """End, start and spelling of the first of each stop string that it has."""
        for stop in stops:
            start = self._text.find(stop)
            if start >= 0:
                last = start + len(stop) - 1
                yield self._place(last) + 1, self._place(start), stop

    def certain(self, stops: Sequence[str]) -> int:
        """How much of the whole text comes before what may begin a stop string."""
        held = unfinished_tag(self._text, stops)
        return self._place(len(self._text) - held) if held else self._length

    def _place(self, at: int) -> int:
        for start, end in self._left_out:
            at += end - start if start <= at else 0
        return at


def unfinished_tag(text: AnyStr, tags: Sequence[AnyStr]) -> int:
    """Length of the longest end of ``text`` with which one of ``tags`` begins, short of all of it.

    >>> unfinished_tag("so <to", ["<tool_call>"])
    3
    """
    longest = max(map(len, tags), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        end = text[start:]
        if any(len(end) < len(tag) and tag.startswith(end) for tag in tags):
            return len(end)
    return 0


class IncrementalDecoder:
    """Token ids to text, in amortised constant time per token.

    A window of recent tokens is decoded again with each token; what it adds is settled, except for
    an unfinished character at its end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = _prompt_tail(tokenizer, prompt_token_ids)
        text = tokenizer.decode(self._window)
        self._emitted = len(text.removesuffix(REPLACEMENT))  # characters of the window's text
        # Of an unfinished character at the prompt's end: what is the prompt's unless it completes.
        self._prompt_end = text[self._emitted :]

    def push(self, *token_ids: int) -> str:
        """Take tokens; return the text that has become certain."""
        tokenizer = self._tokenizer
        shown = [token_id for token_id in token_ids if has_text(tokenizer, token_id)]
        if not shown:
            return ""
        self._window += shown
        text = tokenizer.decode(self._window)
        settled = text.removesuffix(REPLACEMENT)  # it may be an unfinished character
        fresh = self._advance(settled)
        if len(self._window) > _MAX_WINDOW:
            self._window = self._window[-_CONTEXT:]
            self._emitted = len(tokenizer.decode(self._window)) - (len(text) - len(settled))
        return fresh

    def _advance(self, settled: str) -> str:
        if self._prompt_end and len(settled) > self._emitted:
            if settled.startswith(self._prompt_end, self._emitted):
                self._emitted += len(self._prompt_end)
            self._prompt_end = ""
        fresh = settled[self._emitted :]
        self._emitted = max(self._emitted, len(settled))
        return fresh

    def flush(self) -> str:
        """The rest, as if no token followed; U+FFFD for an unfinished character."""
        return self._advance(self._tokenizer.decode(self._window))


def has_text(tokenizer: Tokenizer, token_id: int) -> bool:
    """Whether decoding shows the token."""
    return not tokenizer.is_special(token_id) and tokenizer.id_to_token(token_id) is not None


def _prompt_tail(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    scanned = reversed(prompt[-_MAX_PROMPT_SCAN:])
    shown = (token_id for token_id in scanned if has_text(tokenizer, token_id))
    return [*itertools.islice(shown, _CONTEXT)][::-1]
