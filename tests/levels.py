"""Instruction-set levels of this CPU, for tests of whole models.

Their bits are those of the kernels, which ``tests/native`` compares at every level. So the best
level and the plainest run always, and those between are marked slow.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from paceline.models.ops.native import native_module, why_not_native
from tests.quick import in_turns

LEVELS: list[str] = native_module().isas() if why_not_native() is None else []
BETWEEN = LEVELS[1:-1]


def marked(name: str, level: str) -> object:
    """A parameter of that name, which runs at the level."""
    return pytest.param(name, marks=pytest.mark.slow) if level in BETWEEN else name


def in_turns_with_levels(*axes: Iterable[object]) -> list[object]:
    """As :func:`tests.quick.in_turns`, with the levels before the last axis; those between are
    slow."""
    *others, last = axes
    ordered = [*(level for level in LEVELS if level not in BETWEEN), *BETWEEN]
    return [
        pytest.param(*each.values, marks=pytest.mark.slow) if each.values[-2] in BETWEEN else each
        for each in in_turns(*others, ordered, last)
    ]


SOME = [marked(level, level) for level in LEVELS]
