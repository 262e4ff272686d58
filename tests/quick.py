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


def once(first: Iterable[Any], *others: Iterable[Any], times: int = 1) -> list[Any]:
    """Every combination. With each value of the first axis one is quick, the rest are slow.

    Combinations of the others take turns: first those that step along all of these axes at once.

    Args:
        times: how many are quick with each value.
    """
    sizes = [len(list(axis)) for axis in others]

    def turn(places: tuple[int, ...]) -> tuple[int, ...]:
        apart = [(places[0] - each) % size for each, size in zip(places, sizes, strict=True)]
        return *apart[1:], places[0]

    turns = dict(sorted(_product(others), key=lambda each: turn(each[0]))).values()
    return [
        _param((value, *values), (at - place * times) % len(turns) < times)
        for place, value in enumerate(first)
        for at, values in enumerate(turns)
    ]


def share(values: Iterable[Any], size: int, begin: int = 0) -> list[Any]:
    """All values, of which each ``size``-th is quick: tests that show the same share them out."""
    return [_param((value,), at % size == begin) for at, value in enumerate(values)]


def _product(axes: Iterable[Iterable[Any]]) -> Iterable[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """The places on the axes, and the values there."""
    for each in itertools.product(*map(enumerate, axes)):
        places, values = zip(*each, strict=True)
        yield places, values


def _param(values: tuple[Any, ...], is_quick: bool) -> Any:
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)
