"""Files and folders that somebody named, read and written, with one error where that fails.

What is read is untrusted and has limits; a pointer that Git LFS left in a file's place is
recognised. What is written is there as a whole or not at all: until it is complete it has another
name beside the final one. Knows no format but JSON, and no meaning of a key.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelLoadError, PacelineError


@contextmanager
def read_as(error: type[PacelineError], what: str | Path) -> Iterator[None]:
    """Read what somebody named, and raise ``error`` when the system does not let it be read;
    ``what`` is the file or folder as the error is to name it.
    """
    try:
        yield
    except OSError as failure:
        inside = failure.filename
        where = "" if inside is None or str(inside) in str(what) else f"{inside}: "
        raise error(f"cannot read {what}: {where}{failure.strerror or failure}") from failure


def checked_path(path: str | Path, error: type[PacelineError]) -> tuple[Path, bool]:
    """A path without ``~``, and whether something is there; ``error`` for what can be no path."""
    found = Path(os.path.expanduser(path))
    try:
        return found, found.is_dir() or found.is_file()
    except OSError as failure:
        reason = failure.strerror or failure
        raise error(f"{str(path)[:80]!r} is not a usable path: {reason}") from failure


@contextmanager
def whole_file(
    path: str | Path, error: type[PacelineError], make_folder: bool = False
) -> Iterator[Path]:
    """Write a file under the name that this yields; it gets its own when the block ends well.

    A link stays, and what it leads to is written. A device or a pipe is written directly. ``error``
    is raised when the system does not let it be written.
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


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Of Linux's renameat2(2); ``include/uapi/linux/fs.h``, ``fcntl.h``."""


def exchange_folders(path: Path, other: Path, error: type[PacelineError]) -> None:
    """Give each of two folders of one disk the other's name.

    On Linux there is no moment without ``path``; elsewhere, and on file systems that cannot do
    that, there is a short one. ``error`` is raised, and nothing has changed, where it fails.
    """
    with _told_as(error, path):
        if not _exchanged(path, other):
            aside = _beside(path)
            os.rename(path, aside)
            try:
                os.rename(other, path)
            except OSError:
                os.rename(aside, path)
                raise
            os.rename(aside, other)


def _exchanged(path: Path, other: Path) -> bool:
    """Whether the system did it at once."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:  # of a C library from before 2018
        return False
    names = (_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other))
    return bool(rename(*names, _RENAME_EXCHANGE) == 0)


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


_START = b"version https://git-lfs.github.com/spec/"
HEAD_BYTES = len(_START)
"""How much of a file tells whether it is a pointer."""


def check_fetched(path: str | Path, head: bytes) -> None:
    """Raise :class:`ModelLoadError` where a file that begins with ``head`` is a pointer."""
    if head.startswith(_START):
        raise ModelLoadError(
            f"{path} is not the file itself but a pointer of Git LFS to it; run `git lfs pull` in "
            "the repository that it belongs to"
        )


MAX_JSON_BYTES = 64 << 20


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    """The file's text.

    Raises:
        ModelLoadError: it cannot be read, is larger than ``limit`` bytes, is not UTF-8, or was not
            fetched by Git LFS.
    """
    with read_as(ModelLoadError, path), path.open("rb") as file:
        data = file.read(limit + 1)
    check_fetched(path, data)
    if len(data) > limit:
        raise ModelLoadError(f"{path} is larger than {limit} bytes, the most that is read of it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is not UTF-8 text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file; ``ModelLoadError`` as by :func:`read_text`, or for another
    value.
    """
    return parsed_json(read_text(path), path)


def read_json_list(path: Path) -> list[Any]:
    """The JSON array in the file; raises as :func:`read_json`."""
    array: list[Any] = _parsed(read_text(path), path, list, "array")
    return array


def parsed_json(text: str, path: Path) -> dict[str, Any]:
    """The JSON object in the text of a file; raises as :func:`read_json`."""
    members: dict[str, Any] = _parsed(text, path, dict, "object")
    return members


def _parsed(text: str, path: Path, kind: type, name: str) -> Any:
    try:
        value = json.loads(text)
    # A recursion error comes from brackets nested without end.
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, kind):
        raise ModelLoadError(f"{path} must hold a JSON {name}, not a {type(value).__name__}")
    return value
