"""The native correction of cost tables against the one in Python, which it must equal."""

from __future__ import annotations

import random

import pytest

from paceline.policy.cost_correction import ASSUMED, MAX_WIDTH, MEASURED, Correction, Trust

native = pytest.importorskip("paceline._native", reason="the native kernels are not built")

WIDTHS = (0, 1, 2, 3, 5, 8, 17, 40, 41, 300, MAX_WIDTH, MAX_WIDTH + 1, 5000)


@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("trust", [MEASURED, ASSUMED, Trust(spread=0.2, memory=4.0)])
def test_it_learns_and_predicts_the_same(trust: Trust, is_relative: bool) -> None:
    """Through moods, changes of single widths and hiccups; a short memory forgets on the way."""
    rng = random.Random(int(trust.memory))
    python, fast = Correction(trust, is_relative), native.Correction(trust, is_relative)
    times = [1.0 + 0.1 * n for n in range(40)]
    mood, changed = 0.0, 0.0
    for at in range(2000):
        assert fast.knows_unit == python.knows_unit
        assert [*map(fast.is_ambiguous, WIDTHS)] == [*map(python.is_ambiguous, WIDTHS)]
        width = rng.choice(WIDTHS[:-4]) if rng.random() < 0.95 else rng.choice(WIDTHS)
        if rng.random() < 0.01:
            mood, changed = rng.gauss(0, 1), rng.gauss(0, 0.5)
        level = rng.gauss(mood + changed * (width == 5), 0.05) + 3.0 * (rng.random() < 0.02)
        python.observe(width, level)
        fast.observe(width, level)
        if at % 10 == 0:
            assert [fast.factor(w) for w in WIDTHS] == [python.factor(w) for w in WIDTHS]
            assert fast.growth(times, width, 20) == python.growth(times, width, 20)


def test_there_may_be_fewer_times_than_are_asked_for() -> None:
    python, fast = Correction(MEASURED, False), native.Correction(MEASURED, False)
    for model in (python, fast):
        model.observe(3, 0.7)
    assert fast.growth((1, 2.5), 1, 9) == python.growth((1, 2.5), 1, 9)
    assert fast.growth([], 1, 0) == []
