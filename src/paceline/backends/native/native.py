"""The optional extension module: whether it is there, and why not. Knows no kernels."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from paceline.core.errors import ConfigError

log = logging.getLogger(__name__)
PACKAGE = Path(__file__).resolve().parents[2]
NAME = "_native"
MODULE = f"paceline.{NAME}"
NOTE = "without_native.txt"
"""Lies in a package that was built without the extension, and says why."""
ISA_VARIABLE = "PACELINE_CPU_ISA"


class Missing(NamedTuple):
    """Why the extension cannot be used, and what to do about it."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; to get them {self.remedy}"


@cache
def _load() -> ModuleType | Missing:
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        found = explain(PACKAGE, error)
        log.warning("running without the native kernels, which are several times faster: %s", found)
        return found


def explain(package: Path, error: ImportError) -> Missing:
    """Why the extension of a package's folder cannot be imported."""
    if (package.parents[1] / "CMakeLists.txt").is_file():
        remedy = "run make native in the checkout"
    else:
        remedy = (
            "install Paceline again where a C++17 compiler is, with pip's --force-reinstall and "
            "--no-cache-dir"
        )
    return Missing(next(_reasons(package, error)), remedy)


def _reasons(package: Path, error: ImportError) -> Iterator[str]:
    """Reasons that apply, the most telling one first."""
    if any((package / f"{NAME}{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        yield f"the extension {MODULE} is there and does not load ({error})"
    for found in sorted(package.glob(f"{NAME}.*")):
        yield (
            f"the extension {found.name} is of another Python or system than this one, which "
            f"loads {NAME}{EXTENSION_SUFFIXES[0]} ({sys.executable})"
        )
    note = package / NOTE
    if note.is_file():
        cause = note.read_text(encoding="utf-8", errors="replace").strip()
        yield f"Paceline was built without native kernels because {cause}"
    yield f"the extension {MODULE} is missing: there is no {NAME}{EXTENSION_SUFFIXES[0]}"


def missing() -> Missing | None:
    """None where the extension can be used."""
    found = _load()
    return found if isinstance(found, Missing) else None


def why_not_native() -> str | None:
    """None where the extension can be used, otherwise the reason and what to do about it."""
    found = missing()
    return None if found is None else str(found)


def native_module() -> ModuleType:
    """The extension; only where :func:`missing` finds nothing against it."""
    found = _load()
    assert not isinstance(found, Missing), found
    return found


def check_isa() -> None:
    """Raise :class:`ConfigError` where the level that the environment asks for cannot run."""
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted is not None and wanted not in native_module().isas():
        raise ConfigError(
            f"{ISA_VARIABLE} is {wanted!r}; this CPU and this build have "
            f"{', '.join(native_module().isas())}"
        )
