"""The folders of the user in which Paceline keeps and looks for files. Creates none of them.

They follow the XDG base directory specification, by which a relative path is invalid and ignored.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PACKED = "packed"
"""The kind of cache that has the folders of models packed to be read from disk."""
CACHED = {
    "models": "models fetched by their short names",
    PACKED: "copies of models, packed to be read from disk",
    "profiles": "measured and imported costs of steps",
}
"""What each kind of cache holds; all of it can be made again."""


@dataclass(frozen=True, slots=True)
class UserFolder:
    """A folder that is there, what it holds, and the bytes of its files."""

    folder: str
    holds: str
    num_bytes: int


def cache_folder(kind: str) -> Path:
    """``paceline/KIND`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``; of :data:`CACHED`."""
    assert kind in CACHED, kind
    return _base("XDG_CACHE_HOME", ".cache") / "paceline" / kind


def config_folder() -> Path:
    """``paceline`` in ``$XDG_CONFIG_HOME``, by default ``~/.config``: what the user wrote."""
    return _base("XDG_CONFIG_HOME", ".config") / "paceline"


def state_folder() -> Path:
    """``paceline`` in ``$XDG_STATE_HOME``, by default ``~/.local/state``: what was typed."""
    return _base("XDG_STATE_HOME", ".local/state") / "paceline"


def places() -> tuple[UserFolder, ...]:
    """All of these folders that are there."""
    holds = {cache_folder(kind): what for kind, what in CACHED.items()}
    holds[config_folder()] = "what you wrote: names of models"
    holds[state_folder()] = "what you typed in chats"
    return tuple(
        UserFolder(str(folder), what, _num_bytes(folder))
        for folder, what in holds.items()
        if folder.is_dir()
    )


def _num_bytes(folder: Path) -> int:
    """Of the files in a folder and its folders; a file that goes meanwhile has none."""
    found = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return found


def _base(variable: str, default: str) -> Path:
    configured = os.environ.get(variable, "")
    return Path(configured) if os.path.isabs(configured) else Path.home() / default
