"""How much room packed copies of models take, and which are in use. Knows no model.

A copy's ``config.json`` is locked while a process has the model, and is as old as the latest time
at which one began to.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import weakref
from contextlib import suppress
from pathlib import Path

import xxhash

from paceline.core.errors import ConfigError

if sys.platform != "win32":
    import fcntl

log = logging.getLogger(__name__)
MARK = "config.json"
SHARE = 0.5
"""Of what the disk would have free without copies; what nobody limits may take that much."""


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
