"""How the files of a split GGUF model are called: ``NAME-00001-of-00003.gguf``, as gguf-split does.

Knows names alone. Imports nothing slow.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import NamedTuple, TypeVar

MAX_SHARDS = 1024
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
AnyPath = TypeVar("AnyPath", bound=PurePath)


class ShardName(NamedTuple):
    """What a shard's name says.

    Attributes:
        stem: the name before the numbers, which all shards of a model share.
        number: counted from 1.
        total: how many shards there are.
    """

    stem: str
    number: int
    total: int


def shard_name(name: str) -> ShardName | None:
    """What the name of a file says; None where it is not that of a shard."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    number, count = int(match["number"]), int(match["count"])
    return ShardName(match["stem"], number, count) if 1 <= number <= count <= MAX_SHARDS else None


def sibling_shards(path: AnyPath) -> list[AnyPath]:
    """All shards of a file's model, in order, there or not; the file alone if it is none."""
    said = shard_name(path.name)
    if said is None:
        return [path]
    end = path.name[-len(".gguf") :]
    names = (f"{said.stem}-{i:05d}-of-{said.total:05d}{end}" for i in range(1, said.total + 1))
    return [path.with_name(name) for name in names]


def is_later_shard(path: Path) -> bool:
    """Whether a file is a shard, but not the first one, which stands for all."""
    said = shard_name(path.name)
    return said is not None and said.number > 1
