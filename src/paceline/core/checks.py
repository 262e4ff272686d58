"""Checks that every configuration makes of its values, and fields that carry theirs.

Knows no configuration.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.errors import ConfigError, PacelineError
from paceline.core.installation import install_command

T = TypeVar("T")
Check = Callable[[str, Any], None]
"""Takes a setting's name and its value, and raises :class:`ConfigError` unless it is allowed."""
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"-?(?:{_PART.pattern})+")
_MEMORY = re.compile(r"(\d+(?:\.\d*)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def memory_bytes(size: str | int) -> int:
    """Bytes in ``512M``, ``1.5G`` or ``1048576``; units are powers of 1024."""
    match = _MEMORY.fullmatch(str(size).strip())
    count = int(float(match[1]) * 1024 ** _UNITS[match[2].upper()]) if match else 0
    if count < 1:
        raise ConfigError(
            f"{size!r} is not an amount of memory; write 512M, 2G or a number of bytes"
        )
    return count


def seconds_of(value: object) -> float:
    """Seconds in ``300``, ``"300"``, ``"5m"`` or ``"1h30m"``; infinite where it is negative."""
    text = str(value).strip()
    if not isinstance(value, (int, float, str)) or isinstance(value, bool):
        text = ""
    if _DURATION.fullmatch(text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
        return math.inf if text.startswith("-") else seconds
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise ConfigError(
            f"{str(value)[:40]!r} is not a duration; write seconds, 5m or 1h30m, or -1 for no limit"
        )
    return math.inf if seconds < 0 else seconds


def check_number(
    name: str,
    value: float,
    low: float,
    high: float,
    kind: type = int,
    error: type[PacelineError] = ConfigError,
    param: str | None = None,
) -> None:
    """Raise ``error`` unless a value is a number in its range.

    ``kind`` int wants a whole number; float takes either. Booleans are neither. The error's
    ``param`` is the name where no other is given.
    """
    allowed = (int, float) if kind is float else int
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        what = "numbers" if kind is float else "whole numbers"
        message = f"{name} is {value!r}; allowed: {what} from {low} to {high}"
        raise error(message, param or name)


def setting(default: Any, help: str, check: Check | None = None, **more: Any) -> Any:
    """A field of a configuration that carries what it means and what its value has to pass.

    Args:
        default: ``MISSING`` where ``more`` has a ``default_factory``.
        help: a sentence for users, which the command line and the reference page show.
        more: for :func:`dataclasses.field`.
    """
    return field(default=default, metadata={"help": help, "check": check}, **more)


def did_you_mean(name: str, allowed: Iterable[str], prefix: str = "") -> str:
    """`` (did you mean X?)``, for a name that is none of those allowed; empty if none is near.

    Args:
        prefix: of all names, which does not count: it would make all of them similar.
    """
    from difflib import get_close_matches  # which a program that mistypes nothing need not load

    stems = [each.removeprefix(prefix) for each in allowed]
    near = get_close_matches(name.removeprefix(prefix), stems, n=1)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""


def sentences(*texts: str) -> str:
    """Texts in a row, each ended by a full stop unless it has an end of its own."""
    ended = [text if text.endswith((".", "?", "!")) else f"{text}." for text in texts[:-1]]
    return " ".join([*ended, *texts[-1:]])


def check_fields(config: Any, names: Iterable[str], error: type[PacelineError]) -> None:
    """Raise ``error`` with advice unless all names are those of fields of a dataclass."""
    known = {each.name: each for each in fields(config) if each.init}
    for name in names:
        if name not in known:
            advice = f"{did_you_mean(name, known)}; allowed: {', '.join(known)}"
            raise error(f"{config.__name__} has no field {name!r}{advice}", name)


def refuses_unknown(error: type[PacelineError]) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass: an argument that is none of its fields is an ``error`` with advice."""

    def decorated(config: Any) -> Any:
        init = config.__init__
        known = frozenset(each.name for each in fields(config) if each.init)

        @functools.wraps(init)
        def checked(self: Any, *values: Any, **named: Any) -> None:
            if not known.issuperset(named):
                check_fields(config, named, error)
            init(self, *values, **named)

        config.__init__ = checked
        return config

    return decorated


def check_settings(config: Any) -> None:
    """Raise :class:`ConfigError` unless each field of a configuration passes its own check."""
    for each in fields(config):
        check = each.metadata.get("check")
        if check is not None:
            check(each.name, getattr(config, each.name))


def whole(low: int, high: int) -> Check:
    """Whole numbers from ``low`` to ``high``."""
    return lambda name, value: check_number(name, value, low, high)


def number(low: float, high: float) -> Check:
    """Numbers from ``low`` to ``high``."""
    return lambda name, value: check_number(name, value, low, high, float)


def one_of(allowed: Collection[str]) -> Check:
    """Any of these names."""
    return lambda name, value: check_choice(name, value, allowed)


def optional(check: Check) -> Check:
    """None, or what passes another check."""
    return lambda name, value: None if value is None else check(name, value)


def check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; allowed: true and false", name)


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}; allowed: a string", name)


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
        raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}", name)


def require_torch(purpose: str) -> None:
    """Raise :class:`ConfigError` where torch is not installed."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError(
            f"{purpose}, which needs torch ({error}): {install_command('torch')}"
        ) from error
