"""What an answer consists of, in the order in which it was written: thoughts, words and calls.

Owns how parts follow each other, where they and their tokens stand in the answer's text, and how
many tokens are thoughts. Knows no protocol but OpenAI's, whose form of a part is what the other
protocols are made of.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from paceline.request.request import TokenLogprobs
from paceline.server.engine_process.messages import Piece
from paceline.text.detokenizer import IncrementalDecoder, has_text
from paceline.text.tokenizer import Tokenizer

Places = tuple[tuple[int, int], ...]
"""Stretches of the answer as it was generated, each from one character to before another."""


class Thoughts(NamedTuple):
    text: str


class Words(NamedTuple):
    """``places`` are where they stood, which tells what tokens they consist of."""

    text: str
    places: Places = ()


class CallOpening(NamedTuple):
    """A call begins: the answer's call ``number``, from 0 on."""

    number: int
    call_id: str
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the call that was opened last, as JSON."""

    number: int
    text: str


Part = Thoughts | Words | CallOpening | CallArguments


def opening(number: int, name: str) -> CallOpening:
    """The beginning of a call, with an id of its own."""
    return CallOpening(number, f"call_{secrets.token_hex(12)}", name)


def add(parts: list[Part], part: Part) -> None:
    """Add a part, joined to the last one of its kind. One without text is left out, unless it opens
    a call.
    """
    if isinstance(part, CallOpening):
        parts.append(part)
        return
    last = parts[-1] if parts else None
    if not part.text:
        return
    if isinstance(part, Words) and isinstance(last, Words):
        parts[-1] = Words(last.text + part.text, together(last.places, part.places))
    elif not isinstance(part, Words) and type(last) is type(part):
        parts[-1] = last._replace(text=last.text + part.text)
    else:
        parts.append(part)


def delta_of(part: Part) -> dict[str, Any]:
    """The part as the ``delta`` of a choice in OpenAI's chats."""
    if isinstance(part, Thoughts):
        return {"reasoning_content": part.text}
    if isinstance(part, Words):
        return {"content": part.text}
    if isinstance(part, CallArguments):
        return {"tool_calls": [{"index": part.number, "function": {"arguments": part.text}}]}
    function = {"name": part.name, "arguments": ""}
    begun = {"index": part.number, "id": part.call_id, "type": "function", "function": function}
    return {"tool_calls": [begun]}


class PlacedText:
    """A text that grows at its end and is taken from its beginning, with its places."""

    def __init__(self, text: str = "", start: int = 0) -> None:
        self.text = text
        self.places: Places = ((start, start + len(text)),) if text else ()

    def append(self, more: PlacedText) -> None:
        self.text += more.text
        self.places = together(self.places, more.places)

    def take(self, count: int) -> PlacedText:
        """Take the first characters off."""
        taken, rest = PlacedText(), count
        taken.text, self.text = self.text[:count], self.text[count:]
        before, after = list[tuple[int, int]](), list[tuple[int, int]]()
        for start, end in self.places:
            middle = min(start + rest, end)
            rest -= middle - start
            before += [(start, middle)] if start < middle else []
            after += [(middle, end)] if middle < end else []
        taken.places, self.places = tuple(before), tuple(after)
        return taken

    def take_all(self) -> PlacedText:
        return self.take(len(self.text))

    @property
    def words(self) -> Words:
        return Words(self.text, self.places)


def together(first: Places, second: Places) -> Places:
    """The places of a text that consists of two; they are one where the second goes on."""
    joined = list[tuple[int, int]](first)
    for start, end in second:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)


class Placed(NamedTuple):
    """A token whose text is certain: its first character, the one behind its last, and its
    log-probs where there are some.
    """

    start: int
    end: int
    logprobs: TokenLogprobs | None


class TokenPlaces:
    """Follows one sample. Tokens without text, such as that of the end, have no place."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, prompt_token_ids)
        self._length = 0  # of the text that is certain
        self._uncertain: list[TokenLogprobs | None] = []  # of tokens whose text is to come

    def take(self, piece: Piece) -> list[Placed]:
        """The tokens whose text became certain with a piece. Those that only together are whole
        characters have one place.
        """
        placed = list[Placed]()
        count = len(piece.token_ids)
        entries: Sequence[TokenLogprobs | None] = piece.logprobs or [None] * count
        for token_id, entry in zip(piece.token_ids, entries, strict=True):
            if has_text(self._tokenizer, token_id):
                self._uncertain.append(entry)
                placed += self._place(self._decoder.push(token_id))
        if piece.finish_reason is not None:
            placed += self._place(self._decoder.flush())
        return placed

    def _place(self, text: str) -> list[Placed]:
        """Text has become certain: that of the tokens without places."""
        if not text:
            return []
        start, self._length = self._length, self._length + len(text)
        placed = [Placed(start, self._length, entry) for entry in self._uncertain]
        self._uncertain.clear()
        return placed


class PlacedTokens:
    """The tokens of one sample, taken as it becomes known which places of its text matter."""

    def __init__(self) -> None:
        self._tokens = deque[Placed]()

    def add(self, placed: Iterable[Placed]) -> None:
        self._tokens.extend(placed)

    def take(self, places: Places) -> list[Placed]:
        """Those at these places, in whole or in part; tokens before their end are not kept."""
        taken, last = list[Placed](), places[-1][1] if places else 0
        while self._tokens and self._tokens[0].start < last:
            token = self._tokens.popleft()
            if any(token.start < stop and begin < token.end for begin, stop in places):
                taken.append(token)
        return taken


class ThoughtPlaces(NamedTuple):
    """Where thoughts stand in an answer, between their marks and with them, as far as that is
    certain.

    White space around thoughts is part of them. Places only grow at their end.
    """

    inside: Places = ()
    marked: Places = ()


class ThoughtCount(NamedTuple):
    """Tokens of thoughts: without those that only spell marks, and with them."""

    inside: int = 0
    marked: int = 0


class ThoughtTokens:
    """Counts the tokens of one sample whose text lies in its thoughts, in whole or in part.

    vLLM counts those between the marks (``count_reasoning_tokens`` in ``vllm/reasoning``, commit
    5d9dca91) and Anthropic those of the marks as well (``OutputTokensDetails`` of its package
    2.14).
    """

    def __init__(self) -> None:
        self._inside, self._marked = PlacedTokens(), PlacedTokens()

    def take(self, placed: Sequence[Placed], places: ThoughtPlaces) -> ThoughtCount:
        """What a piece with these tokens adds, behind which thoughts stand at these places."""
        self._inside.add(placed)
        self._marked.add(placed)
        inside, marked = self._inside.take(places.inside), self._marked.take(places.marked)
        return ThoughtCount(len(inside), len(marked))
