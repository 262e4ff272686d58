"""Models that are to be read from disk and are not packed for it: packed once, into the cache.

Owns which folder is whose, how much room packed copies take, and which of them are in use: a copy's
``config.json`` is locked while a process has the model, and is as old as the latest time at which
one began to. Knows no arithmetic.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import weakref
from contextlib import suppress
from pathlib import Path

import xxhash

from paceline.backends.native.packing import WEIGHT_BITS, Packer
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.folders import PACKED, cache_folder
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import Checkpoint, load_checkpoint, model_fingerprint
from paceline.models.tensor_reader import VERSION
from paceline.tensors.stored import StoredTensors

log = logging.getLogger(__name__)
MARGIN = 1.02
"""What is written over the weights' own bytes: tiles are filled up, and a tokenizer is added."""


def packed_size(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes that the weights take as they are packed, about."""
    if checkpoint.packed is not None or dtype == "file":
        return checkpoint.num_bytes
    return round(checkpoint.config.num_weights * WEIGHT_BITS[dtype] / 8)


def packed_place(checkpoint: Checkpoint, dtype: str) -> Path:
    """The folder of a model that is packed as ``dtype``, whether it is there or not.

    It is another one where the model's files have changed since, and may be deleted at any time.
    All of a model's that are packed as one dtype begin alike, up to the last dash.

    Raises:
        ConfigError: the model does not lie in files.
    """
    if not checkpoint.files:
        raise ConfigError(
            f"weights are read from disk out of files, and {checkpoint.name} was given in memory: "
            "name its folder or file, or leave --weight-memory out"
        )
    known = xxhash.xxh3_128(f"{model_fingerprint(checkpoint)} {VERSION}".encode())
    for path in checkpoint.files:
        found = path.stat()
        known.update(f" {path.name} {found.st_size} {found.st_mtime_ns}".encode())
    name = re.sub(r"[^\w.-]+", "-", checkpoint.name)[:60].strip(".-")
    where = place_mark(checkpoint.files[0])
    return cache_folder(PACKED) / f"{name}-{dtype}-{where}-{known.hexdigest()[:16]}"


def find_packed(checkpoint: Checkpoint, dtype: str) -> StoredTensors | None:
    """The tensors of that folder; None where it is not there, or damaged."""
    folder = packed_place(checkpoint, dtype)
    if not (folder / "config.json").is_file():
        return None
    try:
        tensors = load_checkpoint(folder, with_tokenizer=False).tensors
    except ModelLoadError as error:
        log.warning("the packed copy of %s is damaged: %s", checkpoint.name, error)
        return None
    assert isinstance(tensors, StoredTensors)
    return tensors


def packed_tensors(checkpoint: Checkpoint, dtype: str, limit: int | None = None) -> StoredTensors:
    """The same, in use; what is not there is written first, which takes minutes for a large model.

    Args:
        limit: bytes of all models' folders; for None see :func:`make_room`.

    Raises:
        ConfigError: there is no room for it, or the native kernels cannot run the model.
        ModelLoadError, UnsupportedModelError: the model cannot be packed.
    """
    folder, size = packed_place(checkpoint, dtype), packed_size(checkpoint, dtype)
    was_there, found = folder.exists(), _used(checkpoint, dtype)
    if found is not None:
        return found
    _remove_useless(folder, is_damaged=was_there)
    needed = int(size * MARGIN)
    make_room(folder, needed, limit)
    _check_room(checkpoint.name, folder, needed)
    log.warning(
        "packing %s once, so that its weights can be read from disk as they are needed: %.2f GB in "
        "%s, which may be deleted at any time",
        checkpoint.name,
        size / 1e9,
        folder,
    )
    try:
        write_packed(checkpoint, folder, Packer(dtype))
    except ConfigError:
        if find_packed(checkpoint, dtype) is None:  # no other process was faster
            raise
    if packed_place(checkpoint, dtype) != folder:
        shutil.rmtree(folder, ignore_errors=True)
        raise ModelLoadError(f"{checkpoint.name} was changed while it was packed; try again")
    found = _used(checkpoint, dtype)
    assert found is not None
    return found


def _used(checkpoint: Checkpoint, dtype: str) -> StoredTensors | None:
    held = hold(packed_place(checkpoint, dtype))
    found = find_packed(checkpoint, dtype)
    if found is not None:
        found.in_use = held
    return found


def _check_room(name: str, folder: Path, needed: int) -> None:
    there = next(parent for parent in folder.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(
            f"{name} has to be packed before its weights can be read from disk, which takes "
            f"{needed / 1e9:.2f} GB in {folder.parent}; {free / 1e9:.2f} GB are free there: make "
            "room (`paceline models --remove-packed` deletes what other models were packed into), "
            "let XDG_CACHE_HOME name another disk, or write a folder elsewhere with "
            "`paceline convert MODEL FOLDER` and run that"
        )


def _remove_useless(folder: Path, is_damaged: bool) -> None:
    """What was packed of the model's files before they changed, or by processes that ended while
    they wrote; and the folder itself, where it is damaged."""
    same = folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*")
    useless = [place for place in same if place != folder or is_damaged]
    for partial in folder.parent.glob(".*.partial"):
        if not Path("/proc", partial.name.split(".")[-2]).exists():
            useless.append(partial)
    for place in useless:
        shutil.rmtree(place, ignore_errors=True)


if sys.platform != "win32":
    import fcntl

MARK = "config.json"
SHARE = 0.5
"""Of what the disk would have free without copies: the limit where none is given."""


class Hold:
    """An open file that says that a copy is in use, for as long as this lives."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)


def hold(folder: Path) -> Hold | None:
    """Begin to use a copy; None where it is not there."""
    held = _opened(folder)
    if held is None:
        return None
    if sys.platform != "win32":
        with suppress(OSError):  # a file system without locks
            fcntl.flock(held.descriptor, fcntl.LOCK_SH)
    try:
        if not os.path.samestat(os.fstat(held.descriptor), (folder / MARK).stat()):
            return hold(folder)  # it was removed meanwhile, and made again
        os.utime(folder / MARK)
    except FileNotFoundError:
        return None
    except OSError:  # it cannot be written to
        pass
    return held


def _opened(folder: Path) -> Hold | None:
    try:
        return Hold(os.open(folder / MARK, os.O_RDONLY))
    except OSError:
        return None


def packed_copies(cache: Path) -> dict[Path, int]:
    """Folders of copies in the cache's, and their bytes."""
    places = [place for place in cache.glob("[!.]*") if place.is_dir()]
    return {p: sum(file.stat().st_size for file in p.glob("*")) for p in sorted(places)}


def place_mark(file: Path) -> str:
    """What stands for a model's first file in the names of its copies, before the last dash."""
    return xxhash.xxh3_64_hexdigest(str(file.resolve()).encode())[:8]


def copies_of(model: Path, cache: Path) -> list[Path]:
    """The copies of a model, which is a file or a folder."""
    files = model.glob("*") if model.is_dir() else [model]
    marks = {place_mark(file) for file in files}
    return [copy for copy in packed_copies(cache) if marks.intersection(copy.name.split("-")[-2:])]


def make_room(folder: Path, needed: int, limit: int | None) -> None:
    """Remove copies beside one that is about to be made, those first that were not used for the
    longest, until all take no more than they may; none that is in use.

    Args:
        needed: bytes of the new one.
        limit: of all; None is a share of the disk, and the new one may take more.

    Raises:
        ConfigError: the limit cannot be kept.
    """
    copies = packed_copies(folder.parent)
    there = next(parent for parent in folder.parents if parent.exists())
    taken = sum(copies.values()) + needed
    room = shutil.disk_usage(there).free + taken - needed
    most = int(room * SHARE) if limit is None else limit
    is_possible = needed <= (room if limit is None else limit)
    removed = []
    for copy in sorted(copies, key=_last_used) if is_possible else ():
        if taken > min(most, room) and remove_copy(copy):
            taken -= copies[copy]
            removed.append(copy.name)
    if removed:
        log.warning(
            "packed copies of models may take %.2f GB of disk (--packed-space): removed %s, which "
            "were not used for the longest",
            most / 1e9,
            ", ".join(removed),
        )
    if limit is not None and taken > limit:
        in_use = f" beside {(taken - needed) / 1e9:.2f} GB of models in use" if is_possible else ""
        raise ConfigError(
            f"packed copies of models may take {limit / 1e9:.2f} GB of disk, and this one takes "
            f"{needed / 1e9:.2f} GB{in_use}: raise --packed-space, or write a folder elsewhere by "
            "`paceline convert MODEL FOLDER` and run that"
        )


def _last_used(copy: Path) -> float:
    try:
        return (copy / MARK).stat().st_mtime
    except OSError:  # it is no use to anybody
        return 0.0


def remove_copy(copy: Path) -> bool:
    """Delete a copy that no process uses; returns whether it is gone."""
    held = _opened(copy)
    if held is not None and sys.platform != "win32":
        try:
            fcntl.flock(held.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    shutil.rmtree(copy, ignore_errors=True)
    return not copy.exists()
