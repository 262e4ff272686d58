"""How models are asked to fill a gap in a text: the marks of a vocabulary, and their order.

Owns the names that models give these marks. A prompt is what stands before the gap, then what
stands behind it, then the mark after which the model writes ("PSM"). Knows no request and no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import NoFimTokensError

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

GGUF_ROLES = {
    f"fim_{part}_token": f"fim_{part}_token_id"
    for part in ("pre", "suf", "mid", "pad", "rep", "sep")
}
"""Roles of special tokens, and the keys under which a GGUF file has their ids."""
_SPELLED = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""How models spell what begins the text before the gap, the text behind it, and the gap."""
_ALSO_SPELLED = {
    "fim_pad_token": ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>"),
    "fim_rep_token": ("<|repo_name|>", "<repo_name>", "<reponame>"),
    "fim_sep_token": ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>"),
}
_REPOSITORY, _FILE = "repository\n", "file\n"
"""Names that the marks want behind them, where a request has none."""


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Ids of a vocabulary's marks; ``repository`` and ``file`` where it has them.

    Attributes:
        all: every mark; an answer that writes one has filled its gap.
    """

    before: int
    behind: int
    middle: int
    repository: int | None
    file: int | None
    all: tuple[int, ...]


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


def find_fim_tokens(
    named: Mapping[str, str], token_to_id: Callable[[str], int | None]
) -> FimTokens | None:
    """The marks of a vocabulary.

    Args:
        named: role -> token, as the model's files say it; other marks are found by their spelling.
    """
    for spelled in _SPELLED:
        tokens = [named.get(role, usual) for role, usual in zip(GGUF_ROLES, spelled, strict=False)]
        before, behind, middle = map(token_to_id, tokens)
        if before is not None and behind is not None and middle is not None:
            break
    else:
        return None
    also = dict[str, int | None]()
    for role, usual in _ALSO_SPELLED.items():
        ids = map(token_to_id, (named.get(role, ""), *usual))
        also[role] = next((token for token in ids if token is not None), None)
    known = (before, behind, middle, *(token for token in also.values() if token is not None))
    return FimTokens(before, behind, middle, also["fim_rep_token"], also["fim_sep_token"], known)


def fim_prompt(tokenizer: Tokenizer, gap: Gap) -> list[int]:
    """The token ids that ask a model to fill a gap. No text of the gap becomes a mark.

    Raises:
        NoFimTokensError: the vocabulary has no marks.
        RequestError: a text cannot be encoded.
    """
    marks = fim_tokens_of(tokenizer)
    encode = tokenizer.encode_literal
    ids = tokenizer.encode("")[:1]  # the BOS token, where texts begin with it
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
