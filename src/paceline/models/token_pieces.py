"""What each token of a vocabulary writes, as bytes. Owns how vocabularies spell bytes.

Two spellings are known: that of byte-level vocabularies, where every byte has a printable
character, and that of SentencePiece, where a space is U+2581 and single bytes are ``<0xHH>``.
"""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.models.tokenizer import Tokenizer

SPACE = "\u2581"
_FOREIGN = {"WordPiece", "CTC", "BPEDecoder"}


def token_pieces(tokenizer: Tokenizer, vocab_size: int) -> list[bytes | None]:
    """The bytes of each of ``vocab_size`` tokens; None where a token has no text of its own.

    That is so for special tokens, the unknown token, and ids beyond the vocabulary.

    Raises:
        ConfigError: the vocabulary spells its tokens in a way that is not known.
    """
    kinds = tokenizer.decoder_kinds
    if kinds & _FOREIGN:
        raise ConfigError(
            f"a vocabulary decoded by {', '.join(sorted(kinds & _FOREIGN))} cannot be translated; "
            "byte-level and SentencePiece vocabularies can"
        )
    byte_of = {char: byte for byte, char in _byte_characters().items()}
    is_byte_level = "ByteLevel" in kinds
    pieces: list[bytes | None] = []
    for token_id in range(vocab_size):
        spelling = tokenizer.id_to_token(token_id)
        byte = tokenizer.byte_of(token_id)
        if spelling is None or token_id == tokenizer.unk_token_id or tokenizer.is_special(token_id):
            pieces.append(None)
        elif byte is not None:
            pieces.append(bytes((byte,)))
        elif is_byte_level and all(char in byte_of for char in spelling):
            pieces.append(bytes(byte_of[char] for char in spelling))
        else:
            pieces.append(spelling.replace(SPACE, " ").encode("utf-8", "replace"))
    return pieces


def _byte_characters() -> dict[int, str]:
    """GPT-2's character for each byte: itself where it is printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    return characters | {byte: chr(256 + i) for i, byte in enumerate(others)}
