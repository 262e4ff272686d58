"""Files and folders that are written as a whole or not at all, and one error when they cannot be.

What is being written has another name beside the final one until it is complete. Owns these names
and the reading of what the system says; knows no format.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.core.errors import PacelineError


@contextmanager
def whole_file(
    path: str | Path, error: type[PacelineError], make_folder: bool = False
) -> Iterator[Path]:
    """Write a file under the name that this yields; it gets its own when the block ends well.

    A link stays, and what it leads to is written. A device or a pipe is written directly.

    Args:
        error: what to raise when the system does not let it be written.
        make_folder: whether to create the folder that it is to be in.
    """
    target = Path(path)
    with _told_as(error, target):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            yield target
            return
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        final = target.resolve()
        partial = _beside(final)
        try:
            yield partial
            os.replace(partial, final)
        finally:
            with suppress(OSError):
                partial.unlink()


def write_text(
    path: str | Path, text: str, error: type[PacelineError], make_folder: bool = False
) -> None:
    """Write a file of text in UTF-8; for the arguments see :func:`whole_file`."""
    with whole_file(path, error, make_folder) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(
    path: str | Path, document: object, error: type[PacelineError], make_folder: bool = False
) -> None:
    """Write a file of one line of JSON; for the arguments see :func:`whole_file`."""
    write_text(path, json.dumps(document) + "\n", error, make_folder)


@contextmanager
def whole_folder(path: str | Path, error: type[PacelineError]) -> Iterator[Path]:
    """Fill a folder that does not exist yet, or is empty; it is left as it was when that fails.

    Yields where to write. One that exists is filled in its place, as it may be a disk of its own.
    """
    target = Path(path)
    exists = target.is_dir()
    place = target if exists else _beside(target)
    is_complete = False
    try:
        with _told_as(error, target):
            place.mkdir(parents=True, exist_ok=exists)
            yield place
            if not exists:
                os.replace(place, target)
            is_complete = True
    finally:
        if not is_complete:
            for item in place.iterdir() if exists else [place]:
                _remove(item)


@contextmanager
def _told_as(error: type[PacelineError], path: Path) -> Iterator[None]:
    """What the system does not allow becomes an error of ours, which names the final path."""
    try:
        yield
    except Exception as failure:
        # Raised by safetensors instead of an OSError; then its module is there.
        other = getattr(sys.modules.get("safetensors"), "SafetensorError", OSError)
        if not isinstance(failure, OSError | other):
            raise
        reason = getattr(failure, "strerror", None) or failure
        hint = "make room, or choose another place"
        raise error(f"cannot write {path}: {reason}; {hint}") from failure


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
