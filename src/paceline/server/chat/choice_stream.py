"""One sample of a chat while it grows: what each piece adds, as parts of OpenAI's choices.

Owns the order of a stream (role, what the answer consists of, end), log-probabilities as one object
per token, and which part of an answer tells which token. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.core.errors import EngineClosedError
from paceline.request.request import TokenLogprobs
from paceline.server.chat.answer import AnswerParser
from paceline.server.chat.answer_parts import (
    Part,
    Placed,
    PlacedTokens,
    ThoughtCount,
    ThoughtTokens,
    TokenPlaces,
    Words,
    delta_of,
)
from paceline.server.chat.harmony import HarmonyParser
from paceline.server.engine_process.messages import Piece
from paceline.server.engine_process.tokens import OriginTokens, TokenTexts, finite


class ChatChoice:
    """One sample. ``new_thoughts`` counts the tokens of thoughts that the last piece added; where
    its tokens stand is known where anything depends on that.
    """

    def __init__(
        self,
        index: int,
        parser: AnswerParser | HarmonyParser,
        places: TokenPlaces | None,
        logprobs: ChatLogprobs | None,
        origins: OriginTokens | None,
        returns_ids: bool = False,
    ) -> None:
        self._returns_ids = returns_ids
        self._index = index
        self._parser = parser
        self._places = places
        self._thoughts = ThoughtTokens()
        self.new_thoughts = ThoughtCount()
        self._logprobs = logprobs
        self._origins = origins

    def begin(self) -> dict[str, Any]:
        """What a stream tells before anything else of the sample."""
        return self._part({"role": "assistant", "content": ""})

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """What a piece adds: parts of one kind each, in order, and one that ends the sample."""
        placed = self._placed(piece)
        read = self._read(piece, placed)
        parts = [self._part(delta_of(each)) for each in read]
        if piece.token_ids and (self._logprobs or self._origins or self._returns_ids):
            parts = parts or [self._part({})]
            if self._logprobs is not None:
                self._logprobs.add(piece, placed, read, parts)
            if self._origins is not None:
                parts[0]["tokens"] = self._origins.take(piece)
            if self._returns_ids:
                parts[0]["token_ids"] = list(piece.token_ids)
        if piece.finish_reason is not None:
            parts.append(self._end(piece))
        return parts

    def _placed(self, piece: Piece) -> list[Placed]:
        needs_places = self._logprobs is not None and self._logprobs.only_words
        if self._places is None or not (needs_places or self._parser.may_think):
            return []
        return self._places.take(piece)

    def _read(self, piece: Piece, placed: Sequence[Placed]) -> list[Part]:
        may_think = self._parser.may_think
        read = self._parser.push(piece.text, final=piece.finish_reason is not None)
        self.new_thoughts = ThoughtCount()
        if may_think:
            self.new_thoughts = self._thoughts.take(placed, self._parser.thoughts)
        return read

    def _end(self, piece: Piece) -> dict[str, Any]:
        """``EngineClosedError`` where the engine gave the sample up."""
        reason = piece.finish_reason
        if reason not in ("stop", "length"):
            raise EngineClosedError("the engine ended before the answer did")
        if reason == "stop" and self._parser.has_calls:
            reason = "tool_calls"
        return {
            "index": self._index,
            "delta": {},
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
        }

    def _part(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A whole choice, ``message`` in place of ``delta``, from all parts of a sample."""
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    lists: dict[str, list[Any]] = {}  # of log-probabilities and tokens, where some are told
    for part in parts:
        delta = part["delta"]
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            _add_call(calls, call)
        if part["logprobs"] is not None:
            lists.setdefault("logprobs", []).extend(part["logprobs"]["content"])
        for name in ("tokens", "token_ids"):
            if name in part:
                lists.setdefault(name, []).extend(part[name])
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    whole = {**parts[-1], "message": message, **lists}
    del whole["delta"]
    if "logprobs" in lists:
        whole["logprobs"] = {"content": lists["logprobs"]}
    return whole


def _add_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    if "id" in call:
        begun = {name: value for name, value in call.items() if name != "index"}
        calls.append({**begun, "function": dict(call["function"])})
    else:
        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


class ChatLogprobs:
    """Adds the log-probabilities of one sample to the parts of its choice.

    Args:
        only_words: those of the tokens that words consist of, in whole or in part, told with these
            words: thoughts, calls, marks, what a stop string cuts off, and the end have none.
            Otherwise those of every token, that of the end included, told when the token comes.
    """

    def __init__(self, texts: TokenTexts, *, only_words: bool = False) -> None:
        self._texts = texts
        self.only_words = only_words
        self._tokens = PlacedTokens()

    def add(
        self,
        piece: Piece,
        placed: Sequence[Placed],
        answer_parts: Sequence[Part],
        parts: Sequence[dict[str, Any]],
    ) -> None:
        """Args:
        placed: the tokens whose places are known with the piece, which has some.
        answer_parts: the parts of the answer that became certain with it.
        parts: the choice's parts of these, in the same order; at least one.
        """
        if not self.only_words:
            parts[0]["logprobs"] = self._content(piece.logprobs)
            return
        self._tokens.add(placed)
        for part, choice in zip(answer_parts, parts, strict=False):
            if isinstance(part, Words):
                tokens = self._tokens.take(part.places)
                choice["logprobs"] = self._content(t.logprobs for t in tokens if t.logprobs)

    def _content(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [entry_of(entry, self._texts) for entry in entries]}


def entry_of(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    """A token with the likeliest ones at its place."""
    top = [_token(*each, texts) for each in entry.top]
    return {**_token(entry.token_id, entry.logprob, texts), "top_logprobs": top}


def _token(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {
        "token": texts.text(token_id),
        "logprob": finite(logprob),
        "bytes": list(texts.raw(token_id)),
    }
