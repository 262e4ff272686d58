"""Byte tokens, by which vocabularies spell characters that they lack: one token for each byte.

Owns how a run of them reads where it is no UTF-8.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

REPLACEMENT = "\ufffd"


def byte_tokens(token_id: Callable[[str], int | None]) -> dict[int, int]:
    """The byte of each byte token of a vocabulary, by the token's id."""
    found = dict[int, int]()
    for byte in range(256):
        for spelling in (f"<0x{byte:02X}>", f"<0x{byte:02x}>"):
            index = token_id(spelling)
            if index is not None:
                found[index] = byte
    return found


def is_whole(ids: Sequence[int], bytes_of: Mapping[int, int]) -> bool:
    """Whether every run of byte tokens is UTF-8."""
    for is_byte, run in itertools.groupby(ids, bytes_of.__contains__):
        if is_byte:
            try:
                bytes(bytes_of[each] for each in run).decode()
            except UnicodeDecodeError:
                return False
    return True


def mended(
    ids: Sequence[int], bytes_of: Mapping[int, int], spelling: Callable[[int], str | None]
) -> list[str]:
    """The spellings of known tokens, in which bytes that are no character become U+FFFD.

    tokenizers 0.23 has a run of byte tokens read as U+FFFD alone, one for each byte, where any of
    it is no UTF-8. Here its complete characters are kept, and what is between them becomes one
    U+FFFD for each beginning of a character or stray byte, as in llama.cpp b11549.
    """
    found = list[str]()
    for is_byte, run in itertools.groupby(ids, bytes_of.__contains__):
        if is_byte:
            text = bytes(bytes_of[each] for each in run).decode(errors="replace")
            found += [token for character in text for token in _spelled(character)]
        else:
            found += [spelling(each) or "" for each in run]
    return found


def _spelled(character: str) -> list[str]:
    if character == REPLACEMENT:
        return [character]
    return [f"<0x{byte:02X}>" for byte in character.encode()]
