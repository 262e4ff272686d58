"""Arithmetic of the per-step oracle: lists of numbers in, lists of numbers out."""

from __future__ import annotations

from collections.abc import Sequence


def dealt(have: Sequence[int], count: int) -> list[int]:
    """``count`` nodes dealt out level by level, to each request no more than it has."""
    dealt = [0] * len(have)
    level = 0
    while count:
        level += 1
        for i, most in enumerate(have):
            if most >= level and count:
                dealt[i] += 1
                count -= 1
    return dealt
