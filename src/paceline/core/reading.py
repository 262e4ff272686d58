"""Files and folders that somebody named, and one error when the system does not let them be read.

A name can be too long, lead in a circle or through a file, or be another user's. Owns what the
system says of that; knows no format. What is written is :mod:`paceline.core.writing`'s.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.core.errors import PacelineError


@contextmanager
def read_as(error: type[PacelineError], what: str | Path) -> Iterator[None]:
    """Read what somebody named.

    Args:
        error: what to raise when the system does not let it be read.
        what: the file or folder, as the error is to name it.
    """
    try:
        yield
    except OSError as failure:
        inside = failure.filename
        where = "" if inside is None or str(inside) in str(what) else f"{inside}: "
        raise error(f"cannot read {what}: {where}{failure.strerror or failure}") from failure


def checked_path(path: str | Path, error: type[PacelineError]) -> tuple[Path, bool]:
    """A path without ``~``, and whether a file or folder is there; ``error`` for what can be none.

    A link that leads in a circle is there for nobody.
    """
    found = Path(os.path.expanduser(path))
    try:
        return found, found.is_dir() or found.is_file()
    except OSError as failure:
        reason = failure.strerror or failure
        raise error(f"{str(path)[:80]!r} is not a usable path: {reason}") from failure
