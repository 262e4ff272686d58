"""The optional extension module: whether it is there, and why not. Knows no kernels."""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

from paceline.errors import ConfigError

MODULE = "paceline._native"
ISA_VARIABLE = "PACELINE_CPU_ISA"


@cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(MODULE), ""
    except ImportError as error:
        return None, f"the extension {MODULE} was not built or does not load ({error})"


def why_not_native() -> str | None:
    """None where the extension can be used, otherwise the reason."""
    module, reason = _load()
    return None if module is not None else reason


def native_module() -> ModuleType:
    """The extension; only where :func:`why_not_native` finds nothing against it."""
    module, reason = _load()
    assert module is not None, reason
    return module


def check_isa() -> None:
    """Raise :class:`ConfigError` where the level that the environment asks for cannot run."""
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted and wanted not in native_module().isas():
        raise ConfigError(
            f"{ISA_VARIABLE} is {wanted!r}; this CPU and this build have "
            f"{', '.join(native_module().isas())}"
        )
