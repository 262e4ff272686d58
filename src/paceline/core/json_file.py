"""Reading text and JSON objects from untrusted files. Owns the limits; knows no meaning of a key.

Also recognises the pointers that Git LFS leaves in place of large files until they are fetched.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelLoadError
from paceline.core.reading import read_as

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
    """The JSON object in the file.

    Raises:
        ModelLoadError: as :func:`read_text`; or it is not valid JSON, or not an object.
    """
    return parsed_json(read_text(path), path)


def read_json_list(path: Path) -> list[Any]:
    """The JSON array in the file; raises as :func:`read_json`."""
    value = _parsed(read_text(path), path)
    if not isinstance(value, list):
        raise ModelLoadError(f"{path} must hold a JSON array, not a {type(value).__name__}")
    return value


def parsed_json(text: str, path: Path) -> dict[str, Any]:
    """The JSON object in the text of a file; raises as :func:`read_json`."""
    value = _parsed(text, path)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _parsed(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    # A recursion error comes from brackets nested without end.
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
