"""One request's text in the draft's vocabulary, kept up to date as the target's tokens arrive.

Of the text only what is new, and a look-behind window before it, is tokenised again; where the
window's tokens meet those that were there, the rest is taken over. What the draft has read stays
read up to the first token that differs. Knows no model.

The end of a text is tokenised as if nothing followed, which is not how the draft has learnt it: a
word may be cut in two. So the tokens that a longer one could take in are not read; the draft has to
write them again, in whatever tokens, before it goes on.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence

from paceline.proposers.draft_model.continuation import (
    Continuation,
    begins_character,
    continuation,
)
from paceline.proposers.draft_model.vocabulary import VocabularyPair

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
