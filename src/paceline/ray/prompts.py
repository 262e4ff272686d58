"""What tells, without a tokenizer, that two requests belong on the same replica.

Owns how a body becomes :class:`Traits`: hashes of a prompt's leading parts, and of who asks. Bodies
that cannot be read have none; the replica says what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash
from pydantic_core import from_json, to_json

PART_BYTES = 256
MAX_PARTS = 256
_PROMPTS = ("system", "instructions", "tools", "messages", "input", "prompt", "input_prefix")
"""Fields of the served APIs with a prompt's text, in the order in which templates write it."""
_CALLERS = ("user", "cache_salt", "prompt_cache_key", "safety_identifier")
_KEY_HEADERS = (b"authorization", b"x-api-key")


class Traits(NamedTuple):
    """What the choice of a replica goes by.

    Attributes:
        parts: a hash of each leading part of the prompt with all before it; empty without one.
        caller: a hash of who asks; 0 where the request does not say.
    """

    parts: tuple[int, ...] = ()
    caller: int = 0


def traits_of(body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Traits:
    """The traits of a request with this JSON body.

    The parts begin with the API key and ``cache_salt``, across which no KV is shared.
    """
    try:
        document = from_json(body)
    except ValueError:
        return Traits()
    if not isinstance(document, dict):
        return Traits()
    key = [value for name, value in headers if name in _KEY_HEADERS]
    seed = xxhash.xxh3_64_intdigest(b"\0".join((*key, _json(document.get("cache_salt")))))
    named = _named_caller(document)
    caller = xxhash.xxh3_64_intdigest(_json(named), seed=seed) if named else 0
    return Traits(tuple(_hashes(document, seed)), caller)


def _named_caller(document: Mapping[str, Any]) -> list[Any]:
    metadata = document.get("metadata")
    names = [document.get(name) for name in _CALLERS]
    names.append(metadata.get("user_id") if isinstance(metadata, dict) else None)
    return names if any(names) else []


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
