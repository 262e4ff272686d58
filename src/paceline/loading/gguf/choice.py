"""Which GGUF files of a repository or folder a quantisation's name means. Knows names alone.

Publishers put the quantisation into a file's name (``model-Q4_K_M.gguf``, ``model.q4_0.gguf``,
``UD-Q2_K_XL/model-UD-Q2_K_XL-00001-of-00002.gguf``), in which llama.cpp and Ollama look for it too.
The files of a split model are called ``NAME-00001-of-00003.gguf``, as gguf-split calls them.
Imports nothing slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple, TypeVar

from paceline.core.errors import ModelLoadError

_LABEL = re.compile(
    r"(?<![A-Z0-9])(?:UD-)?"
    r"(?:[IT]?Q\d(?:_[A-Z0-9]+)*|(?:MX|NV)FP4(?:_MOE)?|BF16|FP?(?:16|32))(?![A-Z0-9_])"
)
_NO_MODEL = ("mmproj", "imatrix")
MTP_PREFIX = "mtp-"
_DRAFT_PREFIXES = (MTP_PREFIX, "eagle3-", "dflash-", "dspark-")
"""What the names of drafts begin with that lie beside a model, as llama.cpp's converter calls them
and its server looks for them (``common/download.cpp``)."""
_SHOWN = 24


def files_of(names: Iterable[str], tag: str, where: str) -> tuple[str, ...]:
    """The file of a quantisation, or its shards in their order.

    Args:
        names: paths of files below one folder, with ``/`` between their parts.
        tag: a quantisation such as ``Q4_K_M``, or a file's name without ``.gguf`` where several
            files have the same quantisation; upper and lower case are the same.
        where: what the files are of, for errors.

    Raises:
        ModelLoadError: there is no such file, there are several, or some of its shards are missing.
    """
    models = tagged_files(names)
    matching = [files for own, files in models if tag.upper() in own]
    if not matching:
        tags = list(dict.fromkeys(own[0] for own, _ in models))
        there = ", ".join(tags[:_SHOWN])
        said = f"there are {there}" if there else "it has no GGUF file of a model"
        raise ModelLoadError(f"{where} has no GGUF file of {tag[:40]}; {said}")
    if len(matching) > 1:
        stems = ", ".join(_stem(PurePosixPath(files[0])) for files in matching[:_SHOWN])
        raise ModelLoadError(f"{where} has several files of {tag}; name one in its place: {stems}")
    return _complete(matching[0], where)


def tagged_files(names: Iterable[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The models among files, each as its tags in upper case and those of its files that are there.

    The first tag is the quantisation where the name says one.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if _is_model(path):
            models.setdefault(str(sibling_shards(path)[0]), []).append(name)
    return [(_tags(PurePosixPath(files[0])), tuple(files)) for files in models.values()]


def _is_model(path: PurePosixPath) -> bool:
    name = path.name.lower()
    inside = not path.is_absolute() and ".." not in path.parts
    is_draft = name.startswith(_DRAFT_PREFIXES)
    is_other = is_draft or any(word in name for word in _NO_MODEL)
    return inside and name.endswith(".gguf") and not is_other


def drafts_beside(model: str, names: Iterable[str]) -> list[str]:
    """The drafts of a GGUF model among the files beside it: the best one of each prefix.

    A draft's name has nothing that the model's has not, but for its prefix and its quantisation:
    ``mtp-Qwen3.5-Q8_0.gguf`` is one of ``Qwen3.5-9B-Q4_K_M.gguf``. The name that has most of the
    model's is preferred, then the model's own quantisation, then the one with the most bits.
    """
    own, label = _words(PurePosixPath(model))
    found: dict[str, list[tuple[int, bool, int, str]]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        prefix = next((p for p in _DRAFT_PREFIXES if path.name.lower().startswith(p)), "")
        said = shard_name(path.name)
        if prefix and path.suffix.lower() == ".gguf" and (said is None or said.number == 1):
            words, quantisation = _words(path.with_name(path.name[len(prefix) :]))
            if words and words <= own:
                bits = int("".join(re.findall(r"\d+", quantisation)[:1]) or 0)
                rank = len(words), quantisation == label, bits, name
                found.setdefault(prefix, []).append(rank)
    return [max(found[prefix])[-1] for prefix in _DRAFT_PREFIXES if prefix in found]


def _words(path: PurePosixPath) -> tuple[set[str], str]:
    """The parts of a file's name but for its quantisation, and that."""
    stem = _stem(path).upper()
    label = (_LABEL.findall(stem) or [""])[-1]
    words = (word.strip(".") for word in re.split(r"[-_ ]+", stem.replace(label, "")))
    return {word for word in words if word}, label


def _stem(path: PurePosixPath) -> str:
    said = shard_name(path.name)
    return path.name[: -len(".gguf")] if said is None else said.stem


def _tags(path: PurePosixPath) -> tuple[str, ...]:
    stem = _stem(path).upper()
    labels = _LABEL.findall(stem)
    return (labels[-1], stem) if labels else (stem,)


def _complete(files: tuple[str, ...], where: str) -> tuple[str, ...]:
    wanted = [str(path) for path in sibling_shards(PurePosixPath(files[0]))]
    missing = [name for name in wanted if name not in files]
    if missing:
        raise ModelLoadError(
            f"{where} lacks {missing[0]}, one of {len(wanted)} shards of one model"
        )
    return tuple(wanted)


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
