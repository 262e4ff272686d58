"""The folders of the user in which Paceline keeps and looks for files. Creates none of them.

They follow the XDG base directory specification, by which a relative path is invalid and ignored.
"""

from __future__ import annotations

import os
from pathlib import Path

PACKED = "packed"
"""The kind of cache that has the folders of models packed to be read from disk."""


def cache_folder(kind: str) -> Path:
    """``paceline/KIND`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``: what can be made again."""
    return _base("XDG_CACHE_HOME", ".cache") / "paceline" / kind


def config_folder() -> Path:
    """``paceline`` in ``$XDG_CONFIG_HOME``, by default ``~/.config``: what the user wrote."""
    return _base("XDG_CONFIG_HOME", ".config") / "paceline"


def _base(variable: str, default: str) -> Path:
    configured = os.environ.get(variable, "")
    return Path(configured) if os.path.isabs(configured) else Path.home() / default
