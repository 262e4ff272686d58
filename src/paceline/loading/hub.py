"""Models of the hub: whole folders of safetensors, and GGUF files by their quantisation.

``org/name`` is a folder, ``org/name:Q4_K_M`` the GGUF file of that quantisation there; the latter
may begin with ``hf.co/``, as Ollama's names do. Fetches by ``huggingface_hub``, whose cache comes
first where it has the GGUF file. Reads no model.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.installation import install_command
from paceline.loading.gguf.choice import files_of

_HUB_ID = re.compile(
    r"(?:(?P<host>hf\.co|huggingface\.co)/)?"
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<tag>[A-Za-z0-9][\w.-]*))?"
)
# Never code, never pickles.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_MAX_REASON = 300
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
            f"there is no folder {name}, and the hub did not give it: {type(error).__name__}: "
            f"{lines[0][:_MAX_REASON]}"
        ) from error
