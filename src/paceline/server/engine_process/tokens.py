"""Single tokens as text and bytes, for log-probabilities and for showing who drafted what.

Owns how a token is spelled when it stands alone. Knows no endpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from paceline.request.request import TokenLogprobs
from paceline.server.engine_process.messages import Piece
from paceline.text.detokenizer import IncrementalDecoder
from paceline.text.token_pieces import BYTE_OF
from paceline.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; as OpenAI does."""
_REPLACEMENT = "\ufffd"


class TokenTexts:
    """The spelling of every token of a vocabulary, remembered.

    Attributes:
        text: what a token adds to a text; bytes that are no whole character as ``bytes:\\xe2``.
        raw: the bytes that it adds.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.text = functools.cache(self._text)
        self.raw = functools.cache(self._raw)
        # A first token's leading space would be lost, so tokens are decoded after this one.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:] if tokenizer else []
        self._before_text = tokenizer.decode(self._before) if tokenizer else ""

    def _text(self, token_id: int) -> str:
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _raw(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        if tokenizer is None or tokenizer.id_to_token(token_id) is None:
            return f"token_id:{token_id}".encode()
        byte = tokenizer.byte_of(token_id)
        if byte is not None:
            return bytes([byte])
        ids = [*self._before, token_id]
        text = tokenizer.decode(ids, skip_special_tokens=False)[len(self._before_text) :]
        if _REPLACEMENT not in text:
            return text.encode()
        spelling = tokenizer.id_to_token(token_id) or ""
        return _bytes_of_spelling(spelling, text)


def _bytes_of_spelling(spelling: str, text: str) -> bytes:
    """Bytes of a token that is no whole text, if its vocabulary spells bytes."""
    if all(character in BYTE_OF for character in spelling):
        raw = bytes(BYTE_OF[character] for character in spelling)
        if raw.decode(errors="replace") == text:
            return raw
    return text.encode()


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], texts: TokenTexts, count: int
) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt's tokens, as vLLM reports them."""
    return [None if entry is None else _ranked(entry, texts, count) for entry in entries]


def _ranked(entry: TokenLogprobs, texts: TokenTexts, count: int) -> dict[str, Any]:
    ranks = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token_id, logprob) in enumerate(entry.top[:count], start=1):
        ranks.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": texts.text(token_id),
        }
        for token_id, (logprob, rank) in ranks.items()
    }


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
        top = {self._texts.text(entry.token_id): finite(entry.logprob)}
        for token_id, logprob in entry.top[: self._count]:
            top.setdefault(self._texts.text(token_id), finite(logprob))
        return top

    def _advance(self, token_id: int) -> int:
        """Where the token's text begins."""
        offset = self._offset
        if self._decoder:
            self._offset += len(self._decoder.push(token_id))
        return offset


class OriginTokens:
    """The tokens of one answer with their texts and who drafted them, piece by piece.

    The texts are what each token makes certain; together they are the answer's text, except where
    a stop string held some of it back or cut it off.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = tokenizer and IncrementalDecoder(tokenizer, prompt_token_ids)

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        decoder = self._decoder
        tokens = [
            {"id": token_id, "text": decoder.push(token_id) if decoder else "", "origin": origin}
            for token_id, origin in zip(piece.token_ids, piece.origins, strict=True)
        ]
        if tokens and decoder and piece.finish_reason is not None:
            tokens[-1]["text"] = f"{tokens[-1]['text']}{decoder.flush()}"
        return tokens
