"""What single tokens of a vocabulary write, as bytes, and how grammars name them.

Two spellings of bytes are known: that of byte-level vocabularies, where every byte has a printable
character, and that of SentencePiece, where a space is U+2581 and single bytes are ``<0xHH>``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from paceline.core.errors import ConfigError
from paceline.text.tokenizer import Tokenizer

SPACE = "\u2581"
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)
}
"""The byte that each character of a byte-level vocabulary stands for, as GPT-2 introduced them:
printable ones of Latin-1 for themselves, those from U+0100 up for the other bytes, ascending."""
_FOREIGN = {"WordPiece", "CTC", "BPEDecoder"}


def token_pieces(tokenizer: Tokenizer, vocab_size: int) -> list[bytes | None]:
    """The bytes of each of ``vocab_size`` tokens; None where a token has no text of its own.

    That is so for special tokens, the unknown token, and ids beyond the vocabulary.

    Raises:
        ConfigError: the vocabulary spells its tokens in a way that is not known.
    """
    kinds = tokenizer.decoder_kinds
    if not kinds:
        raise ConfigError("a vocabulary without a decoder, which spaces its tokens, is not known")
    if kinds & _FOREIGN:
        raise ConfigError(
            f"a vocabulary decoded by {', '.join(sorted(kinds & _FOREIGN))} cannot be translated; "
            "byte-level and SentencePiece vocabularies can"
        )
    is_byte_level = "ByteLevel" in kinds
    pieces: list[bytes | None] = []
    for token_id in range(vocab_size):
        spelling = tokenizer.id_to_token(token_id)
        byte = tokenizer.byte_of(token_id)
        if spelling is None or token_id == tokenizer.unk_token_id or tokenizer.is_special(token_id):
            pieces.append(None)
        elif byte is not None:
            pieces.append(bytes((byte,)))
        elif is_byte_level and all(char in BYTE_OF for char in spelling):
            pieces.append(bytes(BYTE_OF[char] for char in spelling))
        else:  # an added token of a byte-level vocabulary is spelt as it is
            text = spelling if is_byte_level else spelling.replace(SPACE, " ")
            pieces.append(text.encode("utf-8", "replace"))
    return pieces


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
            ids = tokenizer.encode(text, add_special_tokens=False)
            return ids[0] if len(ids) == 1 else None

        return cls(
            min(tokenizer.vocab_size, vocab_size),
            frozenset(eos_token_ids),
            {text: i for text, i in added.items() if i not in eos_token_ids},
            token_of,
        )
