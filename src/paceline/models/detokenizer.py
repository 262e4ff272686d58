"""Text of one request while its tokens arrive: whole characters only, stop strings recognised.

:class:`TextStream` is the stop checker that the engine is handed. It knows the tokenizer and not
the engine. The concatenation of all released text is what decoding prompt and output together adds
to the text of the prompt, whatever the order and grouping of calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paceline.models.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
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
            into tokens: the one that is complete first, and the longest of several.
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
        self._pending: list[int] = []  # not decoded yet, where no stop string can end the text
        self._held = ""  # certain, but it may begin a stop string
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
        if not may_stop:
            self._release(len(self._held))
            return None
        text = self._held + self._decoder.tentative
        found = _first_complete(text, self._stop)
        if found is None:
            self._release(len(self._held) - _may_begin(self._held, self._stop))
            return None
        start, string = found
        self._held = text
        self._release(start + len(string) if self._include_stop else start)
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

    def _decode(self) -> None:
        self._held += self._decoder.push(*self._pending)
        self._pending.clear()

    def _decode_pending(self) -> None:
        """Decode together what was pushed since the last time; that is cheaper than one by one."""
        if self._pending:
            self._decode()
            self._release(len(self._held))

    def _release(self, count: int) -> None:
        if count:
            self._released.append(self._held[:count])
            self._held = self._held[count:]

    @property
    def text(self) -> str:
        """All text that has been released, taken or not."""
        self._decode_pending()
        return "".join(self._released)


def _first_complete(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Start and spelling of the stop string whose end comes first."""
    found = [(text.find(stop), stop) for stop in stops]
    complete = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
    if not complete:
        return None
    _, start, stop = min(complete)
    return start, stop


def _may_begin(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` with which a stop string begins."""
    longest = max(len(stop) for stop in stops) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return len(text) - start
    return 0


class IncrementalDecoder:
    """Token ids to text, in amortised constant time per token.

    A window of recent tokens is decoded again with each token; what it adds is settled, except for
    what a later token may still change: an unfinished character, and a run of byte tokens, which
    becomes one U+FFFD per byte if any of it proves not to be UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window, run = _prompt_tail(tokenizer, prompt_token_ids)
        self._run = _ByteRun()
        self._emitted_if_broken = 0
        for byte in run:
            self._run.push(byte)
        text = tokenizer.decode(self._window)
        if run and not self._run.is_broken:
            whole = len(self._window) - self._run.num_unfinished
            self._emitted = len(tokenizer.decode(self._window[:whole]))
            self._run.text = ""
            before = tokenizer.decode(self._window[: -len(run)])
            # If the output breaks the prompt's run, that many U+FFFD are still the prompt's.
            self._emitted_if_broken = len(before) + len(run)
        else:
            self._emitted = len(text.removesuffix(_REPLACEMENT))  # characters of the window's text
        # Of an unfinished character at the prompt's end: what is the prompt's unless it completes.
        self._prompt_end = text[self._emitted :]

    def push(self, *token_ids: int) -> str:
        """Take tokens; return the text that has become certain."""
        tokenizer, fresh, is_settled = self._tokenizer, "", True
        for token_id in token_ids:
            if not has_text(tokenizer, token_id):
                continue
            byte = tokenizer.byte_of(token_id)
            if byte is not None:
                if not is_settled:
                    fresh, is_settled = fresh + self._settle(), True
                self._window.append(token_id)
                fresh += self._push_byte(byte)
            else:
                self._window.append(token_id)
                is_settled = False
        return fresh if is_settled else fresh + self._settle()

    def _settle(self) -> str:
        """Decode the window, whose last token is no byte."""
        tokenizer = self._tokenizer
        self._run, self._emitted_if_broken = _ByteRun(), 0
        text = tokenizer.decode(self._window)
        settled = text.removesuffix(_REPLACEMENT)  # it may be an unfinished character
        fresh = self._advance(settled)
        if len(self._window) > _MAX_WINDOW:
            self._window = self._window[-_CONTEXT:]
            self._emitted = len(tokenizer.decode(self._window)) - (len(text) - len(settled))
        return fresh

    def _push_byte(self, byte: int) -> str:
        was_broken = self._run.is_broken
        self._run.push(byte)
        if not self._run.is_broken:
            return ""
        if was_broken:
            self._emitted += 1
            return _REPLACEMENT
        self._emitted = max(self._emitted, self._emitted_if_broken)
        if self._emitted_if_broken:
            self._prompt_end = ""
        return self._advance(self._tokenizer.decode(self._window))

    def _advance(self, settled: str) -> str:
        if self._prompt_end and len(settled) > self._emitted:
            if settled.startswith(self._prompt_end, self._emitted):
                self._emitted += len(self._prompt_end)
            self._prompt_end = ""
        fresh = settled[self._emitted :]
        self._emitted = max(self._emitted, len(settled))
        return fresh

    @property
    def tentative(self) -> str:
        """What the open run of byte tokens reads, should it end here; whole characters only."""
        return self._run.text

    def flush(self) -> str:
        """The rest, as if no token followed; U+FFFD for an unfinished character."""
        self._run = _ByteRun()
        return self._advance(self._tokenizer.decode(self._window))


class _ByteRun:
    """Consecutive byte tokens: what they read so far, and whether they can be UTF-8 at all."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self.text = ""
        self.is_broken = False

    def push(self, byte: int) -> None:
        if self.is_broken:
            return
        try:
            self.text += self._decoder.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self.is_broken, self.text = True, ""

    @property
    def num_unfinished(self) -> int:
        """Bytes at its end that are the beginning of a character."""
        return len(self._decoder.getstate()[0])


def has_text(tokenizer: Tokenizer, token_id: int) -> bool:
    """Whether decoding shows the token."""
    return not tokenizer.is_special(token_id) and tokenizer.id_to_token(token_id) is not None


def _prompt_tail(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[list[int], list[int]]:
    """The prompt's last tokens that have text, and the bytes of the run that it ends with, if any.

    The tail does not begin inside a run of byte tokens, which would read differently cut short.
    """
    tail: list[int] = []
    run: list[int] = []
    for token_id in reversed(prompt[-_MAX_PROMPT_SCAN:]):
        if not has_text(tokenizer, token_id):
            continue
        byte = tokenizer.byte_of(token_id)
        if byte is not None and len(run) == len(tail):
            run.append(byte)
        if len(tail) >= _CONTEXT and byte is None:
            tail.append(token_id)
            break
        tail.append(token_id)
    return tail[::-1], run[::-1]
