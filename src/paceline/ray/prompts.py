"""What tells, without a tokenizer, that two requests belong on the same replica.

Owns how a body becomes hashes of its prompt's leading parts. Bodies that cannot be read have none;
the replica says what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import xxhash
from pydantic_core import from_json, to_json

PART_BYTES = 256
MAX_PARTS = 256
_PROMPTS = ("system", "instructions", "tools", "messages", "input", "prompt", "input_prefix")
"""Fields of the served APIs with a prompt's text, in the order in which templates write it."""
_KEY_HEADERS = (b"authorization", b"x-api-key")


def parts_of(body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> tuple[int, ...]:
    """A hash of each leading part of the prompt in this JSON body with all that is before it.

    The parts begin with the API key and ``cache_salt``, across which no KV is shared.
    """
    try:
        document = from_json(body)
    except ValueError:
        return ()
    if not isinstance(document, dict):
        return ()
    key = [value for name, value in headers if name in _KEY_HEADERS]
    seed = xxhash.xxh3_64_intdigest(b"\0".join((*key, _json(document.get("cache_salt")))))
    return tuple(_hashes(document, seed))


def _hashes(document: Mapping[str, Any], value: int) -> Iterator[int]:
    """A hash for each part; the last part of each message or text may be short."""
    count = 0
    for name in _PROMPTS:
        field = document.get(name)
        if not field:
            continue
        is_list_of_texts = isinstance(field, list) and isinstance(field[0], dict)
        for text in field if is_list_of_texts else (field,):
            data = text.encode("utf-8", "replace") if isinstance(text, str) else _json(text)
            for start in range(0, len(data), PART_BYTES):
                value = xxhash.xxh3_64_intdigest(data[start : start + PART_BYTES], seed=value)
                yield value
                count += 1
                if count == MAX_PARTS:
                    return


def _json(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="constants")
