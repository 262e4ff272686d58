"""How the user installed Paceline, for messages on installing more, and which plugins there are.

Paceline is not on PyPI, so its name alone leads nowhere: an installer records the folder, file or
repository that a distribution came from in ``direct_url.json`` (PEP 610). Knows no extra.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from functools import cache
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distribution,
    entry_points,
)
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "paceline"
CHECKOUT = Path(__file__).resolve().parents[3]
"""The root of the sources, where this module is one of a checkout."""


def plugins_of(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group, of all packages that are installed."""
    return _entry_points(group, tuple(sys.path))


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Of one search path: reading the metadata of all packages takes milliseconds."""
    return tuple(entry_points(group=group))


def install_command(extra: str = "") -> str:
    """The shell command that adds an extra, or else the required packages that are missing, to the
    Python that runs this. It works in any folder.
    """
    return pip_install(*requirement(_origin(_distribution()), extra))


def pip_install(*arguments: str) -> str:
    """The shell command by which pip, or uv where it installed Paceline, installs something."""
    found = _distribution()
    is_uv = found is not None and (found.read_text("INSTALLER") or "").strip() == "uv"
    return shlex.join([*(_uv() if is_uv else _pip()), *arguments])


def requirement(origin: dict[str, Any] | None, extra: str = "") -> list[str]:
    """pip's arguments for what a ``direct_url.json`` describes, with an extra.

    Without one, the distribution came from an index or a folder of wheels by its name, and pip
    takes the installed one for it wherever it came from.
    """
    wanted = f"[{extra}]" if extra else ""
    if origin is None:
        return [NAME + wanted]
    url = str(origin["url"])
    if url.startswith("file:") and not {"vcs_info", "subdirectory"} & origin.keys():
        path = url2pathname(urlsplit(url).path) + wanted
        return ["-e", path] if origin.get("dir_info", {}).get("editable") else [path]
    if vcs := origin.get("vcs_info"):
        revision = vcs.get("requested_revision")
        url = f"{vcs['vcs']}+{url}" + (f"@{revision}" if revision else "")
    folder = origin.get("subdirectory")
    return [f"{NAME}{wanted} @ {url}" + (f"#subdirectory={folder}" if folder else "")]


def _distribution() -> Distribution | None:
    try:
        return distribution(NAME)
    except PackageNotFoundError:
        return None


def _origin(found: Distribution | None) -> dict[str, Any] | None:
    """Where a distribution came from; modules of a checkout without one could come from there."""
    if found is not None:
        text = found.read_text("direct_url.json")
        return None if text is None else json.loads(text)
    if (CHECKOUT / "pyproject.toml").is_file():
        return {"url": CHECKOUT.as_uri(), "dir_info": {"editable": True}}
    return None


def _uv() -> list[str]:
    return ["uv", "pip", "install", "--python", sys.executable]


def _pip() -> list[str]:
    """The word ``pip`` alone where it is the one of this Python."""
    command = shutil.which("pip")
    is_own = command is not None and os.path.dirname(command) == os.path.dirname(sys.executable)
    return ["pip", "install"] if is_own else [sys.executable, "-m", "pip", "install"]
