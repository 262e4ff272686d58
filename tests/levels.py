"""Instruction-set levels of this CPU, for tests of whole models.

Their bits are those of the kernels, which ``tests/native`` compares at every level. So the best
level and the plainest run always, and those between are marked slow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from paceline.backends.native.native import native_module, why_not_native
from tests.quick import once

LEVELS: list[str] = native_module().isas() if why_not_native() is None else []
BETWEEN = LEVELS[1:-1]


def marked(name: str, level: str) -> object:
    """A parameter of that name, which runs at the level."""
    return pytest.param(name, marks=pytest.mark.slow) if level in BETWEEN else name


def once_with_levels(first: Iterable[object], last: Iterable[object]) -> list[object]:
    """As :func:`tests.quick.once`, with the levels in the middle; those between are slow."""
    always = [level for level in LEVELS if level not in BETWEEN]
    others = itertools.product(first, BETWEEN, last)
    slow = [pytest.param(*values, marks=pytest.mark.slow) for values in others]
    return [*once(first, always, last), *slow]


SOME = [marked(level, level) for level in LEVELS]
