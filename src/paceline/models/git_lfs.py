"""Pointers that Git LFS leaves in place of large files until they are fetched."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ModelLoadError

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
