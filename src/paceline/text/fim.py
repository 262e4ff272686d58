"""Filling a gap in a text: the marks by which models are asked to, and the prompts that ask them.

A prompt is what stands before the gap, then what stands behind it, then the mark after which the
model writes ("PSM"). Owns the names that models give these marks. Knows no request and no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Ids of a vocabulary's marks; ``repository`` and ``file`` where it has them. An answer that
    writes one of ``all`` has filled its gap.
    """

    before: int
    behind: int
    middle: int
    repository: int | None
    file: int | None
    all: tuple[int, ...]

    def prompt(
        self, gap: Gap, begin_ids: Iterable[int], encode: Callable[[str, bool], list[int]]
    ) -> list[int]:
        """The token ids that ask to fill a gap.

        Args:
            begin_ids: what every text of the vocabulary begins with.
            encode: token ids of a text, none of them a mark; as at a text's beginning, or not.
        """
        ids = [*begin_ids]
        if gap.others and self.repository is not None:
            ids += [self.repository, *encode(_REPOSITORY, False)]
        for name, text in gap.others:
            if self.file is None:
                ids += encode(f"{text}\n\n", True)
            else:
                ids += [self.file, *encode(f"{name or _FILE.strip()}\n{text}\n", False)]
        if gap.others and self.file is not None:
            ids += [self.file, *encode(_FILE, False)]
        ids += [self.before, *encode(gap.before, True)]
        ids += [self.behind, *encode(gap.behind, False)]
        return [*ids, self.middle, *encode(gap.begun, False)]


def find_fim_tokens(
    named: Mapping[str, str], token_to_id: Callable[[str], int | None]
) -> FimTokens | None:
    """The marks of a vocabulary."""
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


_REPOSITORY, _FILE = "repository\n", "file\n"
"""Names that the marks want behind them, where a request has none."""
