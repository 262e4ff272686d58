"""Combinations of parameters of which some are quick: the others run with the slow tests."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def only(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """All values, of which only these are quick."""
    return [_param((value,), value in quick) for value in values]


def in_turns(*axes: Iterable[Any]) -> list[Any]:
    """Every combination. Those that take turns on the last axis are quick, the others are slow.

    The quick ones hold every pair of two axes' values if the last axis is the shortest.
    """
    size = len(list(axes[-1]))
    return [_param(values, sum(places) % size == 0) for places, values in _product(axes)]


def in_step(*axes: Iterable[Any], steps: int = 0) -> list[Any]:
    """Every combination. Those that step along all axes at once are quick, the others are slow.

    The quick ones hold every value of each axis, if it has no more than ``steps``.
    """
    sizes = [len(list(axis)) for axis in axes]
    quick = {tuple(step % size for size in sizes) for step in range(steps or max(sizes))}
    return [_param(values, places in quick) for places, values in _product(axes)]


def _product(axes: Iterable[Iterable[Any]]) -> Iterable[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """The places on the axes, and the values there."""
    for each in itertools.product(*map(enumerate, axes)):
        places, values = zip(*each, strict=True)
        yield places, values


def _param(values: tuple[Any, ...], is_quick: bool) -> Any:
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)
