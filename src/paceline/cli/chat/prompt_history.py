"""What a person has typed in chats, over sessions: a file that is theirs alone."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.folders import state_folder
from paceline.core.writing import whole_file

MAX_ENTRIES = 1000
"""Kept when a session begins; meanwhile the file grows."""

log = logging.getLogger(__name__)


class PromptHistory:
    """One text in JSON a line, so that a text may have several lines.

    Sessions at the same time add to the same file. One that cannot be written is said to the log,
    once, and nothing more is kept.

    Args:
        path: the file; its folder is made. Nobody else can read either.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or state_folder() / "typed.jsonl"
        self._is_kept = True

    def texts(self) -> list[str]:
        """What was typed, the oldest first; lines that are damaged are passed over."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        if len(lines) > 2 * MAX_ENTRIES:
            self._shorten(lines)
        return [text for line in lines[-MAX_ENTRIES:] if (text := _text(line)) is not None]

    def add(self, text: str) -> None:
        """Keep what was typed."""
        if not self._is_kept:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _append(self._path, json.dumps(text) + "\n")
        except OSError as error:
            self._is_kept = False
            log.warning("what is typed is not kept: %s", error)

    def _shorten(self, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines[-MAX_ENTRIES:])
        try:
            with whole_file(self._path, PacelineError) as partial:
                _append(partial, text)
        except (OSError, PacelineError) as error:
            log.warning("what was typed is not shortened: %s", error)


def _text(line: str) -> str | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _append(path: Path, text: str) -> None:
    """Write behind what a file has; it is private before anything is in it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)
