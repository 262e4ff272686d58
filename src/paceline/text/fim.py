"""The marks of a vocabulary by which models are asked to fill a gap in a text.

Owns the names that models give these marks; :mod:`paceline.text.gaps` puts texts between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
