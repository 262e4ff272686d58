"""Two vocabularies and one request's text in both of them, kept up to date. Knows no model.

A :class:`VocabularyPair` knows what stands for what, whatever the request. A :class:`Translation`
has one request's text in the draft's vocabulary. As the target's tokens arrive, only what is new,
and a look-behind window before it, is tokenised again; where the window's tokens meet those that
were there, the rest is taken over. What the draft has read stays read up to the first token that
differs.

The end of a text is tokenised as if nothing followed, which is not how the draft has learnt it: a
word may be cut in two. So the tokens that a longer one could take in are not read; the draft has to
write them again, in whatever tokens, before it goes on.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
        tokens = self._tokens[first:last]
        for size in range(1, len(data)):
            at = bisect_left(self._sorted, data[:size])
            while at < len(self._sorted) and self._sorted[at] == data[:size]:
                tokens.append(self._tokens[at])
                at += 1
        return tokens


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
        for match in self._pattern.finditer(text):
            items += [*self.plain(text[at : match.start()]), *self._replacements[match[0]]]
            at = match.end()
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
    crossing = {}
    ends = draft.tokenizer.eos_token_ids
    if ends:
        crossing = dict.fromkeys(target.tokenizer.eos_token_ids, ends[0])
    begins = target.tokenizer.bos_token_id, draft.tokenizer.bos_token_id
    if begins[0] is not None and begins[1] is not None:
        crossing.setdefault(begins[0], begins[1])
    for spelling, token in target.specials.items():
        if spelling in draft.specials:
            crossing.setdefault(token, draft.specials[spelling])
    unknown, sizes = target.tokenizer.unk_token_id, (len(target.pieces), len(draft.pieces))
    return {
        old: new
        for old, new in crossing.items()
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
    same = {}
    for token, piece in reversed([*enumerate(draft.pieces)]):
        if piece and piece in by_piece:
            same[token] = by_piece[piece]
    return same


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens of the target for a text.

    Attributes:
        ends: bytes of the text after which each token ends.
        settled: how many of them are likely to stay what they are, whatever text follows.
    """

    tokens: list[int]
    ends: list[int]
    settled: int


def continuation(
    target: Vocabulary, recent: Sequence[int], is_all: bool, text: bytes
) -> Continuation:
    """The target's tokens for a text after its tokens so far.

    They are what the target's tokenizer makes of the text with the tokens before it; none where
    it would merge the two, since then it would not have ended a token here.

    Args:
        recent: the last tokens, none of them special.
        is_all: the text begins with them.
        text: what follows, not necessarily whole characters.
    """
    known = target.written(recent)
    is_start = is_all and known.startswith(target.prefix)
    if is_all and not known:
        known, is_start = target.prefix, True
    while known and not is_start and not begins_character(known, 0):
        known = known[1:]
    data = _valid(known + text)
    if len(data) <= len(known):
        return Continuation([], [], 0)
    tokens, ends = target.encode(data, is_start)
    begin = len(known) if recent else 0  # of what the target still has to write
    first = bisect_right(ends, begin)
    if first and ends[first - 1] != begin:
        return Continuation([], [], 0)
    count = _writable(target, tokens[first:], ends[first:], begin)
    tokens = tokens[first : first + count]
    ends = [end - len(known) for end in ends[first : first + count]]
    return Continuation(tokens, ends, target.settled(data[len(known) :], ends))


def _writable(target: Vocabulary, tokens: Sequence[int], ends: Sequence[int], begin: int) -> int:
    """How many tokens write just what lies between their ends."""
    for count, (token, end) in enumerate(zip(tokens, ends, strict=True)):
        if len(target.piece(token) or b"") != end - begin:
            return count
        begin = end
    return len(tokens)


def begins_character(data: bytes, at: int) -> bool:
    """Whether a character of UTF-8 begins at a place, or the text ends there."""
    return at >= len(data) or data[at] & 0xC0 != 0x80


def _valid(data: bytes) -> bytes:
    """The leading bytes that are whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start]
    return data


LOOK_BEHIND = 12
"""Tokens of the draft before what is new that are tokenised again."""
FARTHEST = 4096
"""Bytes before what is new that are looked at: where the draft does not know the characters, a run
of any length may be one token, or no tokens of it meet those that were there."""
WINDOW = 8
"""Tokens of the target before a draft with which it is tokenised."""
ALIGNED = 4
"""Tokens that have to be the same on both sides for drafting token by token."""
UNKNOWN = "\ufffd"
"""What stands for text that the target could not write."""
TOKENS_PER_TOKEN = 4
"""Tokens of the target that one of the draft may be, where only the end of a text is read."""


class Translation:
    """See the module's docstring.

    Attributes:
        tokens: of the target, taken in so far.
        view: what the draft has to read.
        pending: bytes that it has to write before it goes on.
        is_direct: the text ends in the same tokens on both sides and the vocabularies are close:
            the tokens that both have are drafted as those of the target.

    Args:
        limit: most tokens of the draft; beyond that the first half of the text is forgotten.
    """

    def __init__(self, pair: VocabularyPair, limit: int) -> None:
        self.pair = pair
        self.tokens: list[int] = []
        self.view: list[int] = []
        self.pending = b""
        self.is_direct = False
        self._limit = limit
        self._ids = list(pair.draft.begin)
        self._num_read = 0  # tokens of the target that the ids stand for
        self._kept = 0  # leading ids that the update at hand has not touched
        self._held = ""  # text that may begin a replacement
        self._begin_section()
        self._begin_target()

    def _begin_section(self) -> None:
        """The draft's side of a text after a special token, or at the very beginning."""
        self._floor = len(self._ids)  # where its tokens begin
        self._is_start = True
        self._data = self.pair.draft.prefix  # without what is held
        self._seen = self._data  # what the tokens write
        self._certain = len(self._data)  # of what they write
        self._ends: list[int] = []

    def _begin_target(self) -> None:
        """The target's side of it."""
        self._partial = b""  # an unfinished character
        self._recent: list[int] = []
        self._is_recent_all = True

    @property
    def ratio(self) -> float:
        """Tokens of the draft per token of the target, about."""
        return (1 + len(self._ids)) / (1 + self._num_read)

    @property
    def is_whole(self) -> bool:
        """Nothing of the text was forgotten, so that the view depends on the text alone."""
        return self._num_read == len(self.tokens)

    def update(self, token_ids: Sequence[int]) -> int:
        """Take in what a request has more than before.

        Returns:
            How many leading tokens of the view are as they were.
        """
        before, self._kept = self.view, len(self._ids)
        if not self.tokens:
            self.tokens += token_ids[: -TOKENS_PER_TOKEN * self._limit]
        for token in token_ids[len(self.tokens) :]:
            self._take(token)
            self.tokens.append(token)
            self._num_read += 1
        self._write(final=False)
        if len(self._ids) > self._limit:
            self._forget(len(self._ids) - self._limit // 2)
        self._look()
        same, most = min(self._kept, len(before)), min(len(before), len(self.view))
        while same < most and before[same] == self.view[same]:
            same += 1
        return min(same, most)

    def _take(self, token: int) -> None:
        target = self.pair.target
        piece, spelling = target.piece(token), self.pair.spelt.get(token)
        if piece is not None:
            if not self._recent and self._is_recent_all:
                piece = piece.removeprefix(target.prefix)
            self._is_recent_all = self._is_recent_all and len(self._recent) < WINDOW
            self._recent = [*self._recent[1 - WINDOW :], token]
            text, self._partial = _whole(self._partial + piece)
            self._held += text
            return
        if token == target.tokenizer.unk_token_id:
            self._held += UNKNOWN
            self._begin_target()
            self._is_recent_all = False
            return
        if spelling is not None:
            self._held += spelling
        elif self.tokens or token not in target.begin:
            self._write(final=True)
            if token in self.pair.specials:
                self._ids.append(self.pair.specials[token])
            self._begin_section()
        self._begin_target()

    def _write(self, *, final: bool) -> None:
        """Tokenise what is held; ``final`` when nothing of it can become a replacement."""
        items, self._held = self.pair.split(self._held)
        if final:
            items, self._held = [*items, *self.pair.plain(self._held)], ""
        for item in items:
            if isinstance(item, int):
                self._tokenise(self._data)
                self._ids.append(item)
                self._begin_section()
            else:
                self._data += item.encode()
        held = [item for item in self.pair.plain(self._held) if isinstance(item, str)]
        self._tokenise(self._data + "".join(held).encode())

    def _tokenise(self, data: bytes) -> None:
        """Bring the section's tokens up to its text."""
        if data == self._seen:
            return
        ends = self._ends
        same = len(self._seen) if data.startswith(self._seen) else self._certain
        first = bisect_right(ends, same)  # tokens up to here write what has not changed
        self._seen, self._certain, back, joint = data, len(self._data), LOOK_BEHIND, None
        while joint is None and first > back and same - ends[first - back - 1] <= FARTHEST:
            tokens, fresh = self._encode(data, self._boundary(data, first - back))
            held = {(ends[i], self._ids[self._floor + i]): i for i in range(first - back, first)}
            pairs = enumerate(zip(fresh, tokens, strict=True))
            joint = next(((held[pair] + 1, i + 1) for i, pair in pairs if pair in held), None)
            back *= 2
        if joint is None:
            joint = (0 if same <= FARTHEST else self._boundary(data, first)), 0
            tokens, fresh = self._encode(data, joint[0])
        old, new = joint
        self._ends[old:] = fresh[new:]
        self._ids[self._floor + old :] = tokens[new:]
        self._kept = min(self._kept, self._floor + old)

    def _boundary(self, data: bytes, count: int) -> int:
        """The last place within so many tokens where a character begins."""
        while count and not begins_character(data, self._ends[count - 1]):
            count -= 1
        return count

    def _encode(self, data: bytes, count: int) -> tuple[list[int], list[int]]:
        """The tokens of a text, and their ends, after so many that stay."""
        begin = self._ends[count - 1] if count else 0
        tokens, ends = self.pair.draft.encode(data[begin:], self._is_start and not count)
        first = bisect_right(ends, 0) if count else 0  # what is put in front of any text
        return tokens[first:], [begin + end for end in ends[first:]]

    def _forget(self, count: int) -> None:
        """Drop the oldest tokens, those aside with which every text begins."""
        begin = len(self.pair.draft.begin)
        cut = begin + count - self._floor  # tokens of the section that go
        while 0 < cut < len(self._ends) and not begins_character(self._seen, self._ends[cut - 1]):
            cut += 1
        if cut > 0:
            at = self._ends[cut - 1]
            self._data, self._seen = self._data[at:], self._seen[at:]
            self._certain -= at
            self._ends = [end - at for end in self._ends[cut:]]
            self._is_start = False
            count = cut + self._floor - begin
        self._floor = max(begin, self._floor - count)
        self._num_read -= self._num_read * count // len(self._ids)
        del self._ids[begin : begin + count]
        self._kept = begin

    def _look(self) -> None:
        """What there is to read, and what the draft has to write before it goes on."""
        pair, ends = self.pair, self._ends
        count = min(ALIGNED, len(ends))
        tail = [pair.to_target.get(token) for token in self._ids[len(self._ids) - count :]]
        aligned = tail == self._recent[-count:] if count else not self._recent
        self.is_direct = pair.is_close and aligned and not self._partial
        count = len(ends)
        if not self.is_direct:
            count = pair.draft.settled(self._seen, ends)
            if not self._floor + count:  # the draft has to read something
                count = min(1, len(ends))
        self.view = self._ids[: self._floor + count]
        begin = ends[count - 1] if count else 0
        self.pending = b"" if self.is_direct else self._seen[begin:] + self._partial

    def continuation(self, text: bytes) -> Continuation:
        """The target's tokens for a text after the request's last token."""
        return continuation(self.pair.target, self._recent, self._is_recent_all, text)


def _whole(data: bytes) -> tuple[str, bytes]:
    """The text of what begins with whole characters, and the bytes of an unfinished one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data), decoder.getstate()[0]
