"""Two vocabularies side by side: what their tokens write, and what stands for what.

Owns everything about text that does not depend on a request. Knows no model.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from paceline.text.token_pieces import token_pieces
from paceline.text.tokenizer import Tokenizer

TAIL = 4
"""Tokens at the end of a text that what follows may merge with."""
CLOSE = 0.5
"""Share of the larger vocabulary from which on two cut most texts alike."""
CACHED_MASKS = 256
Item = str | int
"""A stretch of text, or a special token of the draft."""


class Vocabulary:
    """The tokens of one model as bytes.

    Args:
        tokenizer: of the model.
        vocab_size: width of its logits.

    Raises:
        ConfigError: the vocabulary spells its tokens in a way that is not known.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.pieces = token_pieces(tokenizer, vocab_size)
        ordered = sorted((piece, token) for token, piece in enumerate(self.pieces) if piece)
        self._sorted = [piece for piece, _ in ordered]
        self._tokens = [token for _, token in ordered]
        letter = tokenizer.encode("a", add_special_tokens=False)
        self.prefix = self.written(letter).removesuffix(b"a")
        """What encoding a text puts in front of it: a space, or nothing."""
        self.begin = [
            token
            for token in tokenizer.begin_ids
            if token == tokenizer.bos_token_id and token < vocab_size
        ]
        """The token that a text begins with, if any."""
        ids = [token for token in range(vocab_size) if tokenizer.is_special(token)]
        self.specials = {tokenizer.id_to_token(token) or "": token for token in ids}

    def piece(self, token: int) -> bytes | None:
        """What a token writes; None for special tokens and for what is no token."""
        return self.pieces[token] if token < len(self.pieces) else None

    def written(self, tokens: Sequence[int]) -> bytes:
        """What tokens write together; those without a text nothing."""
        return b"".join(self.piece(token) or b"" for token in tokens)

    def encode(self, data: bytes, is_start: bool) -> tuple[list[int], list[int]]:
        """Tokens of a text, and the bytes after which each of them ends.

        Args:
            data: UTF-8; at the start of a text with :attr:`prefix` in front.
        """
        text = data[len(self.prefix) if is_start else 0 :].decode()
        tokens, offsets = self.tokenizer.encode_with_offsets(text)
        widths = np.cumsum([0, *(len(char.encode()) for char in text)])
        lengths = []
        for token, (begin, end) in zip(tokens, offsets, strict=True):
            piece = self.piece(token)
            lengths.append(widths[end] - widths[begin] if piece is None else len(piece))
        if sum(lengths) in (len(data), len(data) + len(self.prefix)):
            ends = np.cumsum(lengths)
        else:  # the text is not written as it is read: the tokenizer's own ends have to do
            ends = np.maximum.accumulate(widths[[end for _, end in offsets]])
        if tokens:
            ends = np.maximum(0, ends + (len(data) - ends[-1]))
        return tokens, ends.tolist()

    def goes_on(self, data: bytes) -> bool:
        """Whether some token begins with ``data`` and is longer."""
        at = bisect_right(self._sorted, data)
        return at < len(self._sorted) and self._sorted[at].startswith(data)

    def settled(self, data: bytes, ends: Sequence[int]) -> int:
        """How many tokens are likely to stay what they are, whatever text follows.

        A token may change when a longer one begins with it and all that comes after it. Rarely it
        changes otherwise: where tokens reach over words, merges of what follows can undo earlier
        ones, and a run of spaces may be cut differently once a word follows.
        """
        for count in range(max(0, len(ends) - TAIL), len(ends)):
            if self.goes_on(data[ends[count - 1] if count else 0 :]):
                return count
        return len(ends)

    def along(self, data: bytes) -> list[int]:
        """Tokens that begin with ``data``, and those that it begins with; all if it is empty."""
        first = bisect_left(self._sorted, data)
        last = bisect_right(self._sorted, data, key=lambda piece: piece[: len(data)])
        found = self._tokens[first:last]
        for size in range(1, len(data)):
            at = bisect_left(self._sorted, data[:size])
            while at < len(self._sorted) and self._sorted[at] == data[:size]:
                found.append(self._tokens[at])
                at += 1
        return found


class VocabularyPair:
    """How text crosses from the target's vocabulary to the draft's, and back.

    Special tokens cross by what they are for (begin and end of a text), by equal spelling, and by
    the replacements; a special token for which nothing stands is left out.

    Args:
        replacements: texts of the target, and what the draft reads instead; special tokens of
            either may be spelt out in them.
    """

    def __init__(
        self,
        target: Vocabulary,
        draft: Vocabulary,
        replacements: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.target, self.draft = target, draft
        self.specials = _crossing_specials(target, draft)
        texts = {}
        for old, new in replacements:
            if old in target.specials and new in draft.specials:
                self.specials[target.specials[old]] = draft.specials[new]
            else:
                texts[old] = _items(new, draft)
        self._replacements = texts
        self._pattern = re.compile(
            "|".join(re.escape(old) for old in sorted(texts, key=len, reverse=True))
        )
        self.spelt = {
            token: spelling
            for spelling, token in target.specials.items()
            if any(spelling in old for old in texts)
        }
        self._same = _same_pieces(target, draft)
        size = max(len(target.pieces), len(draft.pieces))
        self.is_close = len(self._same) >= CLOSE * size
        self.to_target = self._same | {new: old for old, new in reversed(self.specials.items())}
        self.mask = lru_cache(CACHED_MASKS)(self._mask)

    def split(self, text: str) -> tuple[list[Item], str]:
        """A text of the target as the draft reads it, and an end that may begin a replacement."""
        if not self._replacements:
            return [text], ""
        items: list[Item] = []
        at = 0
        for found in self._pattern.finditer(text):
            items += [*self.plain(text[at : found.start()]), *self._replacements[found[0]]]
            at = found.end()
        longest = max(map(len, self._replacements))
        for start in range(max(at, len(text) - longest + 1), len(text)):
            if any(old.startswith(text[start:]) for old in self._replacements):
                return [*items, *self.plain(text[at:start])], text[start:]
        return [*items, *self.plain(text[at:])], ""

    def plain(self, text: str) -> list[Item]:
        """A text in which nothing is replaced; spelt special tokens stand for what they do."""
        ids = {spelling: token for token, spelling in self.spelt.items()}
        if not ids:
            return [text]
        items: list[Item] = []
        for i, part in enumerate(_cut(text, ids)):
            if not i % 2:
                items.append(part)
            elif ids[part] in self.specials:
                items.append(self.specials[ids[part]])
        return items

    def _mask(self, data: bytes) -> bytes:
        """Tokens of the draft that may come where ``data`` has to be written first.

        One bit per token, as in :class:`~paceline.sampling.sampler.SamplingRow`. Special tokens may
        come where nothing has to and the target has something that they stand for.
        """
        allowed = np.zeros(len(self.draft.pieces), dtype=np.uint8)
        allowed[self.draft.along(data)] = 1
        if not data:
            allowed[list(self.specials.values())] = 1
        return np.packbits(allowed, bitorder="little").tobytes()


def _crossing_specials(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Special tokens of the target that the draft has, too; ends of a text first."""
    found = {}
    ends = draft.tokenizer.eos_token_ids
    if ends:
        found = dict.fromkeys(target.tokenizer.eos_token_ids, ends[0])
    begins = target.tokenizer.bos_token_id, draft.tokenizer.bos_token_id
    if begins[0] is not None and begins[1] is not None:
        found.setdefault(begins[0], begins[1])
    for spelling, token in target.specials.items():
        if spelling in draft.specials:
            found.setdefault(token, draft.specials[spelling])
    unknown, sizes = target.tokenizer.unk_token_id, (len(target.pieces), len(draft.pieces))
    return {
        old: new
        for old, new in found.items()
        if old != unknown and old < sizes[0] and new < sizes[1]  # some tokenizers have too many
    }


def _items(text: str, draft: Vocabulary) -> list[Item]:
    """What the draft reads, cut at the special tokens that are spelt out in it."""
    parts = _cut(text, draft.specials)
    return [draft.specials[part] if i % 2 else part for i, part in enumerate(parts)]


def _cut(text: str, words: Iterable[str]) -> list[str]:
    """A text cut before and after words; every second part is one of these."""
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.split(f"({pattern})", text) if pattern else [text]


def _same_pieces(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """From the draft's tokens to those of the target that write the same bytes."""
    by_piece = {piece: token for token, piece in reversed([*enumerate(target.pieces)]) if piece}
    found = {}
    for token, piece in reversed([*enumerate(draft.pieces)]):
        if piece and piece in by_piece:
            found[token] = by_piece[piece]
    return found
