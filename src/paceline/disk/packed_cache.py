"""Models that are to be read from disk and that nobody packed for it: packed once, into the cache.

Owns which folder is whose. Knows no arithmetic.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import xxhash

from paceline.backends.native.packing import WEIGHT_BITS, Packer
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.folders import PACKED, cache_folder
from paceline.disk.packed_folder import write_packed
from paceline.disk.packed_room import hold, make_room, place_mark
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
