"""What numbers and escapes of Python's source code mean: Python itself says it."""

from __future__ import annotations

import ast
import contextlib
import math
import re
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"[+-]?\.?[0-9](?:[eE][+-]|[0-9a-zA-Z_.])*", re.ASCII)
_ESCAPE = re.compile(
    r"""\\(?:N\{[^{}"\\\n]+\}|U[0-9a-fA-F]{8}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}"""
    r"""|[0-7]{1,3}|[abfnrtv\\'"\n])"""
)


def number_of(text: str) -> str | None:
    """A number that Python writes otherwise than JSON, as JSON; None if it is none."""
    if not _NUMBER.fullmatch(text):
        return None
    with contextlib.suppress(ValueError):
        return str(int(text, 0))
    with contextlib.suppress(ValueError, InvalidOperation):
        if set(text) & set(".eE"):
            value = float(text)  # JSON has numbers beyond a double's range, and no infinity
            return repr(value) if math.isfinite(value) else str(Decimal(text))
    return None


def unescaped(text: str) -> str:
    """A string by what stands between its quotation marks."""
    if "\\" not in text:
        return text
    found = _ESCAPE.sub(_character, text)
    # Two halves of a character beyond the first plane, as JSON writes them, become one.
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(escape: re.Match[str]) -> str:
    """What Python reads; a name or a number that no character has stays as it is written."""
    try:
        return str(ast.literal_eval(f'"{escape[0]}"'))
    except SyntaxError:
        return escape[0]
