"""Checks that every configuration makes of its values. Knows no configuration."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path

from paceline.errors import ConfigError, PacelineError


def check_number(
    name: str,
    value: float,
    low: float,
    high: float,
    kind: type = int,
    error: type[PacelineError] = ConfigError,
) -> None:
    """Raise ``error`` unless a value is a number in its range.

    ``kind`` int wants a whole number; float takes either. Booleans are neither.
    """
    allowed = (int, float) if kind is float else int
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        what = "numbers" if kind is float else "whole numbers"
        raise error(f"{name} is {value!r}; allowed are {what} from {low} to {high}")


def check_output(path: str | Path) -> None:
    """Raise :class:`ConfigError` unless a file could be there: its folder is, and it is none."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {folder}")
    if Path(path).is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder; name a file in it")


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Raise :class:`ConfigError` unless a value is one of those allowed."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")


def require_torch(purpose: str) -> None:
    """Raise :class:`ConfigError` where torch is not installed."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError(
            f"{purpose}, which needs torch ({error}): pip install 'paceline[torch]'"
        ) from error
