"""A model whose tensors lie in several GGUF files, as llama.cpp's gguf-split writes them.

Each shard has a header and the keys ``split.no``, ``split.count`` and ``split.tensors.count``; all
other metadata is that of the first. Owns how shards fit together; the others are found by their
names, which :mod:`paceline.loading.gguf.shard_names` knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelLoadError
from paceline.loading.gguf.container import GgufContainer, TensorInfo, read_container
from paceline.loading.gguf.shard_names import MAX_SHARDS, shard_name, sibling_shards

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_SHOWN = 3


def read_shards(path: Path, *, in_memory: bool = False) -> GgufContainer:
    """Parse a file, and the other shards of its model where it is one.

    Returns:
        The file's own container, or for shards the metadata of the first with the tensors of all.

    Raises:
        ModelLoadError: as :func:`read_container`; a shard is missing, or the shards are not of one
            model.
    """
    given = read_container(path, in_memory=in_memory)
    count = _whole(given, _COUNT, 1)
    if count <= 1:
        return given
    if count > MAX_SHARDS:
        raise ModelLoadError(f"{path} says {_COUNT} = {count}; at most {MAX_SHARDS} are read")
    number = _whole(given, _NUMBER)
    said = shard_name(path.name)
    if said is None or (said.number, said.total) != (number + 1, count):
        raise ModelLoadError(
            f"{path} says that it is shard {number + 1} of {count}: its name has to end in "
            f"-{number + 1:05d}-of-{count:05d}.gguf, by which the others are found"
        )
    paths = sibling_shards(path)
    _check_there(paths)
    shards = [
        given if place == number else read_container(each, in_memory=in_memory)
        for place, each in enumerate(paths)
    ]
    return GgufContainer(shards[0].path, shards[0].metadata, _joined(shards))


def _check_there(paths: list[Path]) -> None:
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ModelLoadError(
            f"{paths[0].parent} lacks {', '.join(missing[:_SHOWN])}{more} of the {len(paths)} "
            "shards of this model; download what is missing into the same folder"
        )


def _joined(shards: list[GgufContainer]) -> Mapping[str, TensorInfo]:
    """The tensors of all shards."""
    tensors: dict[str, TensorInfo] = {}
    total = _whole(shards[0], _TENSORS)
    for number, shard in enumerate(shards):
        for key, wanted in ((_NUMBER, number), (_COUNT, len(shards)), (_TENSORS, total)):
            found = _whole(shard, key)
            if found != wanted:
                raise ModelLoadError(
                    f"{shard.path} says {key} = {found}, and the other shards need {wanted}: it is "
                    "of another model, or damaged; download it again"
                )
        doubled = next((name for name in shard.tensors if name in tensors), None)
        if doubled is not None:
            raise ModelLoadError(
                f"tensor {doubled[:80]!r} is in {shard.path} and in a shard before it: the files "
                "are of different models"
            )
        tensors |= shard.tensors
    if len(tensors) != total:
        raise ModelLoadError(
            f"the {len(shards)} shards of {shards[0].path} have {len(tensors)} tensors, and "
            f"{_TENSORS} announces {total}: they are of different models, or damaged"
        )
    return tensors


def _whole(shard: GgufContainer, key: str, default: int | None = None) -> int:
    value: Any = shard.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise ModelLoadError(
            f"{shard.path} says {key} = {str(value)[:40]}; it must be a whole number"
        )
    return value
