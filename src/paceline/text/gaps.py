"""Gaps in texts, and the prompts that ask a model to fill them.

A prompt is what stands before the gap, then what stands behind it, then the mark after which the
model writes ("PSM"). Knows no request and no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import NoFimTokensError
from paceline.text.fim import FimTokens
from paceline.text.tokenizer import Tokenizer

_REPOSITORY, _FILE = "repository\n", "file\n"
"""Names that the marks want behind them, where a request has none."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap in a text.

    Attributes:
        before, behind: the text on its two sides.
        begun: the gap's own first words.
        others: further files, as names and texts; a name may be empty.
    """

    before: str
    behind: str
    begun: str = ""
    others: Sequence[tuple[str, str]] = ()

    @property
    def num_characters(self) -> int:
        texts = (self.before, self.behind, self.begun, *itertools.chain(*self.others))
        return sum(map(len, texts))


def fim_prompt(tokenizer: Tokenizer, gap: Gap) -> list[int]:
    """The token ids that ask to fill a gap, no text of which becomes a mark; ``RequestError``."""
    marks = fim_tokens_of(tokenizer)
    encode = tokenizer.encode_literal
    ids = [*tokenizer.begin_ids]
    if gap.others and marks.repository is not None:
        ids += [marks.repository, *encode(_REPOSITORY, begins=False)]
    for name, text in gap.others:
        if marks.file is None:
            ids += encode(f"{text}\n\n")
        else:
            ids += [marks.file, *encode(f"{name or _FILE.strip()}\n{text}\n", begins=False)]
    if gap.others and marks.file is not None:
        ids += [marks.file, *encode(_FILE, begins=False)]
    ids += [marks.before, *encode(gap.before)]
    ids += [marks.behind, *encode(gap.behind, begins=False)]
    return [*ids, marks.middle, *encode(gap.begun, begins=False)]


def fim_tokens_of(tokenizer: Tokenizer) -> FimTokens:
    """
    Raises:
        NoFimTokensError: the vocabulary has no marks.
    """
    if tokenizer.fim is None:
        raise NoFimTokensError(
            "the model cannot fill a gap before a suffix: its vocabulary has no fill-in-the-middle "
            "tokens; send only the text before the gap, or serve another model"
        )
    return tokenizer.fim
