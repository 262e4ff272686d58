"""Instruction-set levels of this CPU, for tests of whole models.

Their bits are those of the kernels, which ``tests/native`` compares at every level. So the best
level and the plainest run always, and those between are marked slow.
"""

from __future__ import annotations

import pytest

from paceline.models.ops.native import native_module, why_not_native

LEVELS: list[str] = native_module().isas() if why_not_native() is None else []
BETWEEN = LEVELS[1:-1]


def marked(name: str, level: str) -> object:
    """A parameter of that name, which runs at the level."""
    return pytest.param(name, marks=pytest.mark.slow) if level in BETWEEN else name


SOME = [marked(level, level) for level in LEVELS]
