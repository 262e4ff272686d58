"""How grammars may name tokens: by text and by number. Knows no grammar."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from paceline.text.tokenizer import Tokenizer


def _unknown(text: str) -> None:
    return None


@dataclass(frozen=True)
class TokenNames:
    """Tokens of one model.

    Attributes:
        size: their ids are below.
        ends: ids of those that end a text.
        texts: ids of those that are written as one token wherever their text comes.
        find: the id of the one token that a text is as a whole, None where it is several.
    """

    size: int = 0
    ends: frozenset[int] = frozenset()
    texts: Mapping[str, int] = field(default_factory=dict)
    find: Callable[[str], int | None] = _unknown

    @classmethod
    def of(
        cls, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]
    ) -> TokenNames:
        if tokenizer is None:
            return cls()
        added = tokenizer.shown_added_tokens()

        def token_of(text: str) -> int | None:
            found = tokenizer.encode(text, add_special_tokens=False)
            return found[0] if len(found) == 1 else None

        return cls(
            min(tokenizer.vocab_size, vocab_size),
            frozenset(eos_token_ids),
            {text: i for text, i in added.items() if i not in eos_token_ids},
            token_of,
        )
