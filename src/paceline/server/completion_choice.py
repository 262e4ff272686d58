"""Pieces of an answer as choices of the completions format, log-probabilities included.

Owns one choice while it grows. A stream sends what each piece adds; an answer in one body is the
same parts, joined. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.models.detokenizer import IncrementalDecoder
from paceline.models.tokenizer import Tokenizer
from paceline.request import TokenLogprobs
from paceline.server.messages import Piece
from paceline.server.tokens import OriginTokens, TokenTexts, finite


class LegacyLogprobs:
    """Log-probabilities as completions have them: parallel lists, offsets into the text.

    Args:
        count: likeliest tokens to name at each place, besides the one that was chosen.
        text_before: what the text that offsets count in begins with before the first token told.
    """

    def __init__(
        self,
        count: int,
        texts: TokenTexts,
        tokenizer: Tokenizer | None,
        token_ids_before: Sequence[int] = (),
    ) -> None:
        self._count = count
        self._texts = texts
        self._decoder = tokenizer and IncrementalDecoder(tokenizer, token_ids_before)
        self._offset = 0

    def part(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """What these tokens add to each list; no entry is the first token of a prompt."""
        spelled = [self._texts.text(token_id) for token_id in token_ids]
        return {
            "tokens": spelled,
            "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": [self._advance(token_id) for token_id in token_ids],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        # Tokens can be spelled alike: the chosen one's figure stays, then the likeliest one's.
        found = {self._texts.text(entry.token_id): finite(entry.logprob)}
        for token_id, logprob in entry.top[: self._count]:
            found.setdefault(self._texts.text(token_id), finite(logprob))
        return found

    def _advance(self, token_id: int) -> int:
        """Where the token's text begins."""
        offset = self._offset
        if self._decoder:
            self._offset += len(self._decoder.push(token_id))
        return offset


class Choice:
    """One sample of one prompt.

    Args:
        index: among the choices of the answer.
        logprobs, origins: how to report them; None where they are not asked for.
    """

    def __init__(
        self, index: int, logprobs: LegacyLogprobs | None, origins: OriginTokens | None
    ) -> None:
        self._index = index
        self._logprobs = logprobs
        self._origins = origins

    def echo(
        self, text: str, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """The prompt, which comes first where it was asked for."""
        part = self._part(text, self._logprobs_of(token_ids, entries), None, None)
        if self._origins is not None:
            part["tokens"] = []
        return part

    def take(self, piece: Piece) -> dict[str, Any]:
        """What a piece adds."""
        logprobs = self._logprobs_of(piece.token_ids, piece.logprobs)
        part = self._part(piece.text, logprobs, piece.finish_reason, piece.stop_reason)
        if self._origins is not None:
            part["tokens"] = self._origins.take(piece)
        return part

    def end(self) -> dict[str, Any]:
        """Nothing more, for an answer of no tokens."""
        return self._part("", None, "length", None)

    def _logprobs_of(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]] | None:
        return None if self._logprobs is None else self._logprobs.part(token_ids, entries)

    def _part(
        self,
        text: str,
        logprobs: dict[str, list[Any]] | None,
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A whole choice from its parts; there is at least one."""
    whole = {name: value for part in parts for name, value in part.items()}
    whole["text"] = "".join(part["text"] for part in parts)
    told = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    if told:
        whole["logprobs"] = {
            name: [each for part in told for each in part[name]] for name in told[0]
        }
    if any("tokens" in part for part in parts):
        whole["tokens"] = [token for part in parts for token in part.get("tokens", ())]
    return whole
